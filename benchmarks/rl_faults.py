"""Kills and stops in the middle of synchronous runs: python benchmarks/rl_faults.py [--faults N] [--only TEXT]

Workers of every group are sent SIGKILL or SIGSTOP at random moments, in runs of 120 steps, until there were enough
faults of each kind of run:

    actor and rollouts    an actor and two rollouts; beside a plain loop without workers
    every role            PPO: an actor with its critic, a rollout, a reference and a reward model, each on a device of
                          its own; beside the same run without faults

Each run must end, with every prompt trained exactly once and in its order, no process left, and the weights of the
other, bit for bit. Writes benchmarks/results/rl_faults.json. Ends with 1 when one does not.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measure import write

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from harness.reward_folders import reward_folder
from harness.rl_faults import WatchedEngine, faults, left_behind
from harness.rl_runs import expected_weights, rl_config, saved_weights
from hyper_parallel.config.rl_run import RLConfig
from hyper_parallel.rl.controller.recorder import Recorder
from hyper_parallel.rl.run import run

NAME, STEPS = "rl_faults", 120
ROLES: dict[str, dict[str, Any]] = {
    "actor and rollouts": {"roles": {"actor": {"devices": 0}, "rollout": {"devices": "1-2", "page": 16}}},
    "every role": {
        "rl": {"algorithm": "ppo", "kl": 0.1},
        "roles": {
            "actor": {"devices": 0},
            "rollout": {"devices": 1, "page": 16},
            "reference": {"devices": 2},
            "reward": {"devices": 3},
        },
        "task": {"reward": "model"},
    },
}


def main() -> int:
    """Each kind of run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--faults", type=int, default=60, help="of each kind of run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds of runs whose name has this text")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for kind in ROLES:
        if given.only in kind:
            for row in of_kind(kind, given.faults, given.seed):
                rows.append({"kind": kind, **row})
                print(rows[-1], flush=True)
                write(NAME, {"runs": rows, "faults": sum(sum(one["faults"].values()) for one in rows)})
    return int(not all(row["right"] for row in rows))


def of_kind(kind: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Runs until there were enough faults."""
    expected, done = None, 0
    for number in itertools.count():
        if done >= count:
            return
        with tempfile.TemporaryDirectory(prefix="hyper-parallel-") as folder:
            config = config_of(kind, Path(folder), "run")
            if expected is None:
                expected = expected_of(kind, config, Path(folder))
            row = faulted(config, min(count - done, 20), seed + number, expected)
        done += sum(row["faults"].values())
        yield row


def config_of(kind: str, folder: Path, name: str) -> RLConfig:
    """The run, in a folder of its own."""
    given = ROLES[kind]
    roles = {**given["roles"], "restarts": 1000}
    if "reward" in roles:
        model = folder / "reward model"
        roles["reward"] = {**roles["reward"], "model": str(model if model.is_dir() else reward_folder(model))}
    return rl_config(
        folder / name,
        rl={**given.get("rl", {}), "steps": STEPS},
        roles=roles,
        task=given.get("task", {}),
        launch={"threads": 1, "device": "cpu", "timeout": 15},
        checkpoint={"every": 10, "keep": 2},
    )


def expected_of(kind: str, config: RLConfig, folder: Path) -> dict[str, torch.Tensor]:
    """The weights without faults."""
    if kind == "actor and rollouts":
        return expected_weights(config)
    summary = run(config_of(kind, folder, "without faults"))
    assert summary.checkpoint is not None
    return saved_weights(summary.checkpoint)


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
