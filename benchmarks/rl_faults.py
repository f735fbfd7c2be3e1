"""Kills and stops in the middle of synchronous runs: python benchmarks/rl_faults.py [--faults N] [--only TEXT]

Workers of every group are sent SIGKILL or SIGSTOP at random moments, in runs of 120 steps, until there were enough
faults of each kind of run:

    actor and rollouts    an actor and two rollouts; beside a plain loop without workers
    every role            PPO: an actor with its critic, a rollout, a reference and a reward model, each on a device of
                          its own; beside the same run without faults

Each run must end, with every prompt trained exactly once and in its order, no process left, and the weights of the
other, bit for bit. Ends with 1 when one does not.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
from commandline import Only, run
from pages import Benchmark
from processes import scratch

from harness.reward_folders import reward_folder
from harness.rl_faults import WatchedEngine, faults, left_behind
from harness.rl_runs import expected_weights, rl_config, saved_weights
from hyper_parallel.config.rl import RLConfig
from hyper_parallel.rl.controller.recorder import Recorder
from hyper_parallel.rl.run import run as run_rl

BENCHMARK = Benchmark("rl_faults")
STEPS = 120
KINDS: dict[str, dict[str, Any]] = {
    "actor and rollouts": {"roles": {"actor": {"devices": 0}, "rollout": {"devices": "1-2", "page": 16}}},
    "every role": {
        "rl": {"algorithm": "ppo", "kl": 0.1, "steps": STEPS},
        "roles": {
            "actor": {"devices": 0},
            "rollout": {"devices": 1, "page": 16},
            "reference": {"devices": 2},
            "reward": {"devices": 3},
        },
        "task": {"reward": "model"},
    },
}


def of_kind(kind: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Runs until there were enough faults."""
    expected, done = None, 0
    while done < count:
        with scratch() as folder:
            config = config_of(kind, folder, "run")
            if expected is None:
                expected = expected_of(kind, config, folder)
            row = faulted(config, min(count - done, 20), seed, expected)
        done += sum(row["faults"].values())
        seed += 1
        yield row


def config_of(kind: str, folder: Path, name: str) -> RLConfig:
    roles = {**KINDS[kind]["roles"], "restarts": 1000}
    if "reward" in roles:
        model = folder / "reward model"
        roles["reward"] = {**roles["reward"], "model": str(model if model.is_dir() else reward_folder(model))}
    launch = {"threads": 1, "device": "cpu", "timeout": 15}
    given = {"rl": {"steps": STEPS}, **KINDS[kind], "roles": roles}
    return rl_config(folder / name, **given, launch=launch, checkpoint={"every": 10, "keep": 2})


def expected_of(kind: str, config: RLConfig, folder: Path) -> dict[str, torch.Tensor]:
    if kind == "actor and rollouts":
        return expected_weights(config)
    summary = run_rl(config_of(kind, folder, "without faults"))
    assert summary.checkpoint is not None
    return saved_weights(summary.checkpoint)


def faulted(config: Any, count: int, seed: int, expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    engines: list[WatchedEngine] = []
    trained: dict[int, list[int]] = {}

    def engine() -> WatchedEngine:
        engines.append(WatchedEngine())
        return engines[-1]

    def batch(self: Recorder, report: Any, busy: Any) -> None:
        trained[report.step] = sorted({one.row for one in report.samples})
        original(self, report, busy)

    original, began = Recorder.batch, time.monotonic()
    with (
        mock.patch.object(Recorder, "batch", batch),
        faults(engines, count, seed, (0.2, 2.0), ready=lambda: bool(trained)) as done,
    ):
        summary = run_rl(config, engine=engine, told=lambda line: None)
    assert summary.checkpoint is not None
    found = saved_weights(summary.checkpoint)
    prompts, left = config.rl.prompts, len(left_behind())
    batches = {step: list(range((step - 1) * prompts, step * prompts)) for step in range(1, STEPS + 1)}
    same = all(torch.equal(found[name], value) for name, value in expected.items())
    return {
        "faults": dict(Counter(done)),
        "restarts": summary.restarts,
        "steps": summary.steps,
        "every prompt once": trained == batches,
        "same weights": same,
        "processes left": left,
        "seconds": time.monotonic() - began,
        "right": trained == batches and same and not left and summary.steps == STEPS,
    }


def main(faults: Annotated[int, "of each kind of run"] = 60, seed: int = 0, only: Only = "") -> bool:
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        if only in kind:
            for row in of_kind(kind, faults, seed):
                rows.append({"kind": kind, **row})
                print(rows[-1], flush=True)
                BENCHMARK.keep({"runs": rows, "faults": sum(sum(one["faults"].values()) for one in rows)})
    return not all(row["right"] for row in rows)


if __name__ == "__main__":
    run(main)
