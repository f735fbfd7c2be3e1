"""Asynchronous beside synchronous: python benchmarks/rl_faster.py [--rounds N] [--steps N]

examples/rl/grpo-sort.yaml on two cores, real models, without warm-up and evaluation: seconds per step after the first
ones, of

    colocated      one worker with two threads that generates and trains in turn (synchronous)
    colocated 1    the same with one thread
    apart, η = 0   an actor and a rollout of one thread each, synchronous
    apart, η = 2   the same, asynchronous

interleaved, round after round: medians, and paired ratios with intervals.
"""

from __future__ import annotations

import statistics

from commandline import run
from measure import paired_ratio
from pages import Benchmark
from rl_example import APART, BARE, ran

BENCHMARK = Benchmark("rl_faster")
FIRST = 5
"""Steps that are left out."""
CASES: dict[str, tuple[str, ...]] = {
    "colocated": ("roles.rollout.devices=0", "rl.staleness=0", "launch.threads=2"),
    "colocated 1": ("roles.rollout.devices=0", "rl.staleness=0", "launch.threads=1"),
    "apart, η = 0": (*APART, "rl.staleness=0"),
    "apart, η = 2": (*APART, "rl.staleness=2"),
}
SYNCHRONOUS = tuple(CASES)[:3]


def measured(*overrides: str) -> tuple[float, float]:
    """Median seconds of a step, and the mean share of time for which groups of workers were busy."""
    _, steps = ran([*BARE, *overrides], FIRST)
    busy = [value for step in steps for key, value in step.items() if key.startswith("busy_")]
    return statistics.median(step["step_s"] for step in steps), statistics.fmean(busy)


def main(rounds: int = 5, steps: int = 30) -> None:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    for number in range(rounds):
        for name, overrides in CASES.items():
            found[name].append(measured(*overrides, f"rl.steps={steps}", f"seed={number}"))
        print(number, {name: rows[-1] for name, rows in found.items()}, flush=True)
    seconds, busy = ({name: [row[at] for row in rows] for name, rows in found.items()} for at in (0, 1))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    best = min(SYNCHRONOUS, key=median.__getitem__)
    BENCHMARK.keep(
        {
            "steps": steps,
            "step_s": seconds,
            "median_step_s": median,
            "busy": {name: statistics.median(values) for name, values in busy.items()},
            "best_synchronous": best,
            "asynchronous_over_best": paired_ratio(seconds["apart, η = 2"], seconds[best]),
            "asynchronous_over_colocated": paired_ratio(seconds["apart, η = 2"], seconds["colocated"]),
        }
    )


if __name__ == "__main__":
    run(main)
