"""Kill a real run of two workers, saving after every step, at random moments; go on each time; compare the end.

    python benchmarks/kill_saves.py [--kills 10] [--seed 0]

The command and every process below it get SIGKILL at a moment drawn from 0 to `WINDOW_S` seconds after the first
step of that start. Then the newest checkpoint that verifies is looked up, the same command is started again, and
must go on from that very step. After the last kill the run is left to end. Its losses, gradient norms and every
byte of the tensors in its last checkpoint are compared with those of a run that was not interrupted. Exits with 1 when
anything differs.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from commandline import run
from pages import Benchmark
from processes import scratch

from hyper_parallel.checkpoint import newest

BENCHMARK = Benchmark("kill_saves")
WINDOW_S = 1.5
STEPS = 400
RUN = f"""\
version: 1
out: OUT
model:
  config: {{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
           num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64}}
data: {{train: text.txt, sequence: 32, tokenizer: {{vocab_size: 300}}}}
train: {{steps: {STEPS}, batch: 4, sample: {{tokens: 0}}}}
strategy: {{axes: {{shard: 2}}}}
launch: {{device: cpu, threads: 1}}
checkpoint: {{every: 1}}
trackers: []
"""
"""``OUT`` is the folder of the run."""


def family(pid: int) -> list[int]:
    """A process and all below it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def records(folder: Path, out: str) -> dict[int, dict[str, Any]]:
    """Step to its metrics, of whole lines."""
    path = folder / out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return {record["step"]: record for record in found if "loss" in record}


def results(folder: Path, out: str) -> tuple[dict[int, Any], dict[str, bytes]]:
    """What must not depend on interruptions: every loss and norm, and the bytes of the last checkpoint."""
    values = {step: (row["loss"], row["grad_norm"]) for step, row in records(folder, out).items()}
    files = (folder / out / "checkpoints" / f"step-{STEPS:08d}").glob("*.safetensors")
    return values, {path.name: path.read_bytes() for path in files}


def begin(folder: Path, out: str) -> subprocess.Popen[bytes]:
    """``hyper-parallel train`` into `out`; what it prints and says is in files of that name."""
    text = "".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(2000))
    (folder / "text.txt").write_text(text)
    (folder / f"{out}.yaml").write_text(RUN.replace("OUT", out))
    with (folder / f"{out}.txt").open("wb") as printed, (folder / f"{out}.err").open("wb") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "hyper_parallel", "train", f"{out}.yaml"],
            cwd=folder,
            stdout=printed,
            stderr=said,
            start_new_session=True,
        )


def saved_step(folder: Path, out: str) -> int:
    """Of the newest checkpoint that verifies; 0 without one."""
    found = newest(folder / out / "checkpoints")
    return 0 if found is None else found.step


def kill(folder: Path, out: str, after: float) -> dict[str, Any]:
    """Start the run, kill it `after` seconds behind its first step; what was there before and what is left."""
    expected, printed = saved_step(folder, out), folder / f"{out}.txt"
    command, begun = begin(folder, out), time.monotonic()
    try:
        while b"loss" not in printed.read_bytes():  # the first step of each start is shown at once
            assert command.poll() is None, (folder / f"{out}.err").read_text()
            assert time.monotonic() - begun < 120, "no step within two minutes"
            time.sleep(0.01)
        time.sleep(after)
    finally:
        for pid in family(command.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        command.wait()
    lines = printed.read_text().splitlines()
    resumed = next((int(line.split()[-1]) for line in lines if line.startswith("resumed")), 0)
    committed = saved_step(folder, out)
    return {
        "after_s": round(after, 3),
        "expected_step": expected,
        "resumed_step": resumed,
        "computed_step": max(records(folder, out), default=0),
        "committed_step": committed,
        "half_written": sum(".partial-" in path.name for path in (folder / out / "checkpoints").iterdir()),
        "ok": resumed == expected and committed >= expected,
    }


def finished(folder: Path, out: str) -> tuple[dict[int, tuple[float, float]], dict[str, bytes]]:
    assert begin(folder, out).wait(600) == 0, (folder / f"{out}.err").read_text()
    return results(folder, out)


def main(kills: int = 10, seed: int = 0) -> bool:
    """Run all kills and compare; whether anything differs."""
    draw, rows = random.Random(seed), []
    with scratch() as folder:
        whole = finished(folder, "whole")
        for _ in range(kills):
            rows.append(kill(folder, "killed", draw.uniform(0, WINDOW_S)))
            print(rows[-1], flush=True)
        killed = finished(folder, "killed")
    equal = {
        "metrics_equal": whole[0] == killed[0],
        "tensors_equal": bool(whole[1]) and whole[1] == killed[1],
    }
    ok = all(row["ok"] for row in rows) and all(equal.values())
    losses = [whole[0][STEPS][0], killed[0][STEPS][0]]
    print(f"final losses {losses}; every loss, norm and tensor equal bit for bit: {ok}")
    BENCHMARK.keep({"seed": seed, "steps": STEPS, "kills": rows, "final_loss": losses, **equal, "ok": ok})
    return not ok


if __name__ == "__main__":
    run(main)
