"""Kill a real run of two workers, saving after every step, at random moments; go on each time; compare the end.

    python benchmarks/kill_saves.py [--kills 10] [--seed 0]

The command and every process below it get SIGKILL at a moment drawn from 0 to `WINDOW_S` seconds after the first
step of that start. Then the newest checkpoint that verifies is looked up, the same command is started again, and
must go on from that very step. After the last kill the run is left to end. Its losses, gradient norms and every
byte of the tensors in its last checkpoint are compared with those of a run that was not interrupted.

Prints a table, writes ``benchmarks/results/kill_saves.json``, and exits with 1 when anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measure

from hyper_parallel.checkpoint import newest

WINDOW_S = 1.5
STEPS = 400
HEAD = """\
version: 1
out: OUT
model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
           num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 64}
"""
RUN = f"""\
{HEAD}data: {{train: text.txt, sequence: 32, tokenizer: {{vocab_size: 300}}}}
train: {{steps: {STEPS}, batch: 4, sample: {{tokens: 0}}}}
strategy: {{axes: {{shard: 2}}}}
launch: {{device: cpu, threads: 1}}
checkpoint: {{every: 1}}
trackers: []
"""


def start(folder: Path, out: str) -> subprocess.Popen[bytes]:
    """The command, in a session of its own."""
    (folder / f"{out}.yaml").write_text(RUN.replace("OUT", out))
    with (folder / f"{out}.txt").open("ab") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "hyper_parallel", "train", f"{out}.yaml"],
            cwd=folder,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )


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


def tensors(checkpoint: Path) -> dict[str, bytes]:
    """The bytes of a checkpoint's data files."""
    return {path.name: path.read_bytes() for path in sorted(checkpoint.glob("*.safetensors"))}


def kill(folder: Path, out: str, after: float) -> dict[str, Any]:
    """Start the run, kill it `after` seconds behind its first step; what was there before and what is left."""
    before = newest(folder / out / "checkpoints")
    expected = before.step if before is not None else 0
    text = folder / f"{out}.txt"
    said = text.stat().st_size if text.exists() else 0
    process = start(folder, out)
    deadline = time.monotonic() + 120
    while b"loss" not in text.read_bytes()[said:]:  # the first step of each start is shown at once
        assert process.poll() is None, text.read_text()
        assert time.monotonic() < deadline, "no step within two minutes"
        time.sleep(0.01)
    time.sleep(after)
    for pid in family(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    told = text.read_bytes()[said:].decode()
    resumed = next((int(line.split()[-1]) for line in told.splitlines() if line.startswith("resumed")), 0)
    left = newest(folder / out / "checkpoints")
    return {
        "after_s": round(after, 3),
        "expected_step": expected,
        "resumed_step": resumed,
        "computed_step": max(records(folder, out), default=0),
        "committed_step": left.step if left is not None else 0,
        "half_written": sum(".partial-" in p.name for p in (folder / out / "checkpoints").iterdir()),
        "ok": resumed == expected and (left.step if left is not None else 0) >= expected,
    }


def main() -> None:
    """Run all kills and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "text.txt").write_text(
            "".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(2000))
        )
        assert start(folder, "whole").wait() == 0, (folder / "whole.txt").read_text()
        rows = []
        print(f"{'kill':>4} {'after s':>8} {'resumed':>8} {'computed':>9} {'committed':>10} {'partial':>8}")
        for number in range(1, arguments.kills + 1):
            row = kill(folder, "killed", draw.uniform(0, WINDOW_S))
            rows.append(row)
            print(
                f"{number:>4} {row['after_s']:>8.3f} {row['resumed_step']:>8} {row['computed_step']:>9} "
                f"{row['committed_step']:>10} {row['half_written']:>8}{'' if row['ok'] else '  WRONG'}",
                flush=True,
            )
        assert start(folder, "killed").wait() == 0, (folder / "killed.txt").read_text()
        whole, killed = records(folder, "whole"), records(folder, "killed")
        values = [
            {key: {k: r[k] for k in ("loss", "grad_norm")} for key, r in run.items()}
            for run in (whole, killed)
        ]
        last = [tensors(folder / out / "checkpoints" / f"step-{STEPS:08d}") for out in ("whole", "killed")]
        result = {
            "seed": arguments.seed,
            "steps": STEPS,
            "kills": rows,
            "final_loss": [whole[STEPS]["loss"], killed[STEPS]["loss"]],
            "metrics_equal": values[0] == values[1],
            "tensors_equal": bool(last[0]) and last[0] == last[1],
        }
    result["ok"] = all(row["ok"] for row in rows) and result["metrics_equal"] and result["tensors_equal"]
    path = measure.write("kill_saves", result)
    print(
        f"final loss {result['final_loss'][0]!r} and {result['final_loss'][1]!r}; every loss, norm and tensor ",
        end="",
    )
    print("equal bit for bit" if result["ok"] else "NOT equal", f"-> {path.name}")
    sys.exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
