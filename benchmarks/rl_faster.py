"""Asynchronous beside synchronous: python benchmarks/rl_faster.py [--rounds N] [--steps N]

examples/rl/grpo-sort.yaml on two cores, real models, without warm-up and evaluation: seconds per step after the first
ones, of

    colocated      one worker with two threads that generates and trains in turn (synchronous)
    colocated 1    the same with one thread
    apart, η = 0   an actor and a rollout of one thread each, synchronous
    apart, η = 2   the same, asynchronous

interleaved, round after round. Writes benchmarks/results/rl_faster.json: medians, and paired ratios with intervals.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import paired_ratio, write

from hyper_parallel.config.rl_run import load_rl
from hyper_parallel.rl.run import run

NAME, FIRST = "rl_faster", 5
EXAMPLE = Path(__file__).parents[1] / "examples" / "rl" / "grpo-sort.yaml"
APART = ("roles.actor.devices=0", "roles.rollout.devices=1", "launch.threads=1")
CASES: dict[str, tuple[str, ...]] = {
    "colocated": ("roles.rollout.devices=0", "rl.staleness=0", "launch.threads=2"),
    "colocated 1": ("roles.rollout.devices=0", "rl.staleness=0", "launch.threads=1"),
    "apart, η = 0": (*APART, "rl.staleness=0"),
    "apart, η = 2": (*APART, "rl.staleness=2"),
}


def main() -> int:
    """The rounds, and the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    busy: dict[str, list[float]] = {name: [] for name in CASES}
    for number in range(given.rounds):
        for name, overrides in CASES.items():
            step, used = measured([*overrides, f"rl.steps={given.steps}", f"seed={number}"])
            seconds[name].append(step)
            busy[name].append(used)
        print(number, {name: round(values[-1], 3) for name, values in seconds.items()}, flush=True)
    best = min(
        ("colocated", "colocated 1", "apart, η = 0"), key=lambda name: statistics.median(seconds[name])
    )
    write(
        NAME,
        {
            "steps": given.steps,
            "step_s": seconds,
            "median_step_s": {name: statistics.median(values) for name, values in seconds.items()},
            "busy": {name: statistics.median(values) for name, values in busy.items()},
            "best_synchronous": best,
            "asynchronous_over_best": paired_ratio(seconds["apart, η = 2"], seconds[best]),
            "asynchronous_over_colocated": paired_ratio(seconds["apart, η = 2"], seconds["colocated"]),
        },
    )
    return 0


def measured(overrides: list[str]) -> tuple[float, float]:
    """Median seconds of a step, and the mean share of time for which groups of workers were busy."""
    with tempfile.TemporaryDirectory(prefix="hyper-parallel-") as folder:
        config = load_rl(
            EXAMPLE,
            [
                *overrides,
                f"out={folder}/run",
                "trackers=[]",
                "warmup=null",
                "eval.prompts=1",
                "checkpoint.every=0",
            ],
        )
        run(config)
        records: list[dict[str, Any]] = [
            json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").open()
        ]
    steps = [one for one in records if "step_s" in one][FIRST:]
    shares = [value for one in steps for key, value in one.items() if key.startswith("busy_")]
    return statistics.median(one["step_s"] for one in steps), statistics.fmean(shares)


if __name__ == "__main__":
    sys.exit(main())
