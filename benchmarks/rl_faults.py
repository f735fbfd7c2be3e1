"""Kills and stops in the middle of synchronous runs: python benchmarks/rl_faults.py [--faults N] [--seed N]

Workers of every group are sent SIGKILL or SIGSTOP at random moments, in runs of 120 steps, until there were enough
faults. Each run must end, with every prompt trained exactly once and in its order, no process left, and the weights of
a plain loop without workers, bit for bit. Writes benchmarks/results/rl_faults.json. Ends with 1 when one does not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from measure import write

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from harness.rl_faults import WatchedEngine, faults, left_behind
from harness.rl_runs import expected_weights, rl_config, saved_weights
from hyper_parallel.rl.controller.recorder import Recorder
from hyper_parallel.rl.controller.run import run

NAME, STEPS = "rl_faults", 120


def main() -> int:
    """Runs until there were enough faults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    expected = None
    while sum(sum(row["faults"].values()) for row in rows) < given.faults:
        with tempfile.TemporaryDirectory(prefix="hyper-parallel-") as folder:
            config = rl_config(
                Path(folder) / "run",
                rl={"steps": STEPS},
                roles={"actor": {"devices": 0}, "rollout": {"devices": "1-2", "page": 16}, "restarts": 1000},
                launch={"threads": 1, "device": "cpu", "timeout": 15},
                checkpoint={"every": 10, "keep": 2},
            )
            if expected is None:
                expected = expected_weights(config)
            left = given.faults - sum(sum(row["faults"].values()) for row in rows)
            rows.append(faulted(config, min(left, 20), given.seed + len(rows), expected))
            print(rows[-1], flush=True)
            write(NAME, {"runs": rows, "faults": sum(sum(row["faults"].values()) for row in rows)})
    return int(not all(row["right"] for row in rows))


def faulted(config: Any, count: int, seed: int, expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    """One run."""
    engines: list[WatchedEngine] = []
    trained: dict[int, list[int]] = {}
    lines: list[str] = []

    def engine() -> WatchedEngine:
        engines.append(WatchedEngine())
        return engines[-1]

    def batch(self: Recorder, report: Any, busy: Any) -> None:
        trained[report.step] = sorted({one.row for one in report.samples})
        original(self, report, busy)

    original, Recorder.batch = Recorder.batch, batch  # type: ignore[method-assign]
    began = time.monotonic()
    try:
        with faults(engines, count, seed, (0.2, 2.0), ready=lambda: bool(trained)) as done:
            summary = run(config, engine=engine, told=lines.append)
    finally:
        Recorder.batch = original  # type: ignore[method-assign]
    assert summary.checkpoint is not None
    found = saved_weights(summary.checkpoint)
    prompts = config.rl.prompts
    in_order = all(
        rows == list(range((step - 1) * prompts, step * prompts)) for step, rows in trained.items()
    )
    same = all(torch.equal(found[name], value) for name, value in expected.items())
    return {
        "faults": dict(Counter(done)),
        "restarts": summary.restarts,
        "steps": summary.steps,
        "every prompt once": in_order and sorted(trained) == list(range(1, STEPS + 1)),
        "same weights": same,
        "processes left": len(left_behind()),
        "seconds": time.monotonic() - began,
        "right": in_order and same and not left_behind() and summary.steps == STEPS,
    }


if __name__ == "__main__":
    sys.exit(main())
