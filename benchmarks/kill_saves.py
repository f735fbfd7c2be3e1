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
import random
import time
from pathlib import Path

from commandline import run
from disturbed_runs import HEAD, Command, Row, records, results
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


def saved_step(folder: Path, out: str) -> int:
    """Of the newest checkpoint that verifies; 0 without one."""
    found = newest(folder / out / "checkpoints")
    return 0 if found is None else found.step


def command_of(folder: Path) -> Command:
    return Command(folder, RUN, text=2000)


def kill(folder: Path, out: str, after: float) -> Row:
    """Start the run, kill it `after` seconds behind its first step; what was there before and what is left."""
    expected, printed = saved_step(folder, out), folder / f"{out}.txt"
    with contextlib.closing(command_of(folder)) as command:
        command.start(out)
        while b"loss" not in printed.read_bytes():  # the first step of each start is shown at once
            assert command.ended(0.01) is None, command.said(out)
            assert time.monotonic() - command.begun < 120, "no step within two minutes"
        time.sleep(after)
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
    with contextlib.closing(command_of(folder)) as command:
        assert command.finish(out), command.said(out)
    return results(folder, out, STEPS)


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
