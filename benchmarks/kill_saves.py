"""Kill a real run of two workers, saving after every step, at random moments; go on each time; compare the end.

    python benchmarks/kill_saves.py [--kills 10] [--seed 0]

The command and every process below it get SIGKILL at a moment drawn from 0 to `WINDOW_S` seconds after the first
step of that start. Then the newest checkpoint that verifies is looked up, the same command is started again, and
must go on from that very step. After the last kill the run is left to end. Its losses, gradient norms and every
byte of the tensors in its last checkpoint are compared with those of a run that was not interrupted.

Prints a table, writes ``benchmarks/results/kill_saves.json``, and exits with 1 when anything differs.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from commandline import run
from disturbed_runs import HEAD, Command, records, tensors, write_texts
from pages import Benchmark
from processes import scratch

from hyper_parallel.checkpoint import newest

BENCHMARK = Benchmark("kill_saves")
WINDOW_S = 1.5
STEPS = 400
RUN = f"""\
{HEAD}data: {{train: text.txt, sequence: 32, tokenizer: {{vocab_size: 300}}}}
train: {{steps: {STEPS}, batch: 4, sample: {{tokens: 0}}}}
strategy: {{axes: {{shard: 2}}}}
launch: {{device: cpu, threads: 1}}
checkpoint: {{every: 1}}
trackers: []
"""


def kill(folder: Path, out: str, after: float) -> dict[str, Any]:
    """Start the run, kill it `after` seconds behind its first step; what was there before and what is left."""
    before = newest(folder / out / "checkpoints")
    expected = before.step if before is not None else 0
    command = Command(folder, RUN)
    command.start(out)
    said = folder / f"{out}.txt"
    while b"loss" not in said.read_bytes():  # the first step of each start is shown at once
        assert command.ended(0.01) is None, (folder / f"{out}.err").read_text()
        assert time.monotonic() - command.begun < 120, "no step within two minutes"
    time.sleep(after)
    command.close()
    lines = said.read_text().splitlines()
    resumed = next((int(line.split()[-1]) for line in lines if line.startswith("resumed")), 0)
    left = newest(folder / out / "checkpoints")
    committed = left.step if left is not None else 0
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
    """Losses and norms by step, and the tensors of the last checkpoint, of a run that is left to end."""
    command = Command(folder, RUN)
    try:
        assert command.finish(out) == 0, (folder / f"{out}.err").read_text()
    finally:
        command.close()
    values = {step: (row["loss"], row["grad_norm"]) for step, row in records(folder, out).items()}
    return values, tensors(folder / out / "checkpoints" / f"step-{STEPS:08d}")


def main(kills: int = 10, seed: int = 0) -> bool:
    """Run all kills and compare; whether anything differs."""
    draw = random.Random(seed)
    with scratch() as folder:
        write_texts(folder, text=2000)
        whole = finished(folder, "whole")
        rows = []
        print(f"{'kill':>4} {'after s':>8} {'resumed':>8} {'computed':>9} {'committed':>10} {'partial':>8}")
        for number in range(1, kills + 1):
            row = kill(folder, "killed", draw.uniform(0, WINDOW_S))
            rows.append(row)
            print(
                f"{number:>4} {row['after_s']:>8.3f} {row['resumed_step']:>8} {row['computed_step']:>9} "
                f"{row['committed_step']:>10} {row['half_written']:>8}{'' if row['ok'] else '  WRONG'}",
                flush=True,
            )
        killed = finished(folder, "killed")
    result = {
        "seed": seed,
        "steps": STEPS,
        "kills": rows,
        "final_loss": [whole[0][STEPS][0], killed[0][STEPS][0]],
        "metrics_equal": whole[0] == killed[0],
        "tensors_equal": bool(whole[1]) and whole[1] == killed[1],
    }
    result["ok"] = all(row["ok"] for row in rows) and result["metrics_equal"] and result["tensors_equal"]
    print(
        f"final losses {result['final_loss']}; every loss, norm and tensor equal bit for bit: {result['ok']}"
    )
    BENCHMARK.keep(result)
    return not result["ok"]


if __name__ == "__main__":
    run(main)
