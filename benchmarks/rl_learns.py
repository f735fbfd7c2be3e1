"""Does reinforcement learning learn? python benchmarks/rl_learns.py [--only TEXT] [--again]

examples/rl/grpo-sort.yaml and its variants, each from several seeds: rewards of 1,000 held-out prompts before the first
step and at the end of training (not at its peak), sampled at temperature 1 and greedy. The result is written after each
run; runs that it has are left out unless `--again` is given.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from campaigns import Rows
from commandline import Again, Only, run
from measure import taken
from pages import Benchmark, table
from rl_example import ran

DESCEND = ("task.name=descend", "warmup.until=0.2", "rl.steps=100")
PPO = ("rl.algorithm=ppo", "rl.minibatches=4", "rl.staleness=0", "rl.optimizer.lr=2.0e-4")
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "grpo, sort, η = 1": (5, ()),
    "grpo, sort, η = 0": (5, ("rl.staleness=0",)),
    "grpo, sort, η = 2": (5, ("rl.staleness=2",)),
    "grpo, sort, η = 4": (5, ("rl.staleness=4",)),
    "grpo, descend": (5, DESCEND),
    "rloo, sort": (1, ("rl.algorithm=rloo",)),
    "ppo, sort": (1, PPO),
    "grpo, sort, shuffled rewards": (1, ("task.shuffle_rewards=true", "rl.steps=100")),
}
"""Seeds and overrides of each."""


def measured(overrides: list[str]) -> dict[str, Any]:
    (seconds, _, (found, steps)) = taken(lambda: ran(overrides))
    trained = [one for one in steps if "reward" in one]
    assert found.before is not None
    assert found.after is not None
    return {
        "before": asdict(found.before),
        "after": asdict(found.after),
        "steps": found.steps,
        "seconds": seconds,
        "loop_seconds": sum(one["step_s"] for one in trained),
        "rewards": [round(one["reward"], 3) for one in trained[:: max(1, len(trained) // 10)]],
        "groups_without_variance": sum(one["groups_without_variance"] for one in trained),
        "groups": found.steps * 32,
        "largest_staleness": max(one["staleness_max"] for one in trained),
        "largest_gap": max(one["behaviour_gap"] for one in trained),
    }


def of_case(rows: Mapping[str, Any], case: str) -> list[dict[str, Any]]:
    return [row for name, row in rows.items() if name.rpartition(", seed ")[0] == case]


def summary(rows: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for case in CASES:
        if own := of_case(rows, case):
            found[case] = {
                "seeds": len(own),
                **{
                    f"{metric} {when}": {
                        "least": min(row[when][metric] for row in own),
                        "mean": statistics.fmean(row[when][metric] for row in own),
                        "most": max(row[when][metric] for row in own),
                    }
                    for metric in ("sampled", "greedy")
                    for when in ("before", "after")
                },
                "seconds": statistics.median(row["seconds"] for row in own),
            }
    return found


def page(result: Mapping[str, Any]) -> Iterator[str]:
    """The table of docs/rl.md: of drawn answers the least, the mean and the most over the seeds."""

    def row(case: str, found: Mapping[str, Any]) -> Iterator[object]:
        own = of_case(result["runs"], case)
        yield from (case, len(own))
        for metric in ("sampled", "greedy"):
            for when in ("before", "after"):
                over = found[f"{metric} {when}"]
                keys = ("least", "mean", "most") if len(own) > 1 else ("mean",)
                yield " / ".join(f"{over[key]:.3f}" for key in keys)
        equal = sum(one["groups_without_variance"] for one in own) / sum(one["groups"] for one in own)
        yield from (f"{equal:.0%}", f"{max(one['largest_gap'] for one in own):.2f}")

    yield from table(
        "Run | Seeds | Drawn: before | at the end | Greedy: before | at the end | Equal groups | Gap",
        (tuple(row(case, found)) for case, found in result["cases"].items()),
    )


BENCHMARK = Benchmark("rl_learns", {"rl.md": page}, key="runs")


def main(only: Only = "", again: Again = False) -> None:
    rows = Rows(BENCHMARK, again, summary=lambda runs: {"cases": summary(runs)})
    for case, (seeds, overrides) in CASES.items():
        names = {f"{case}, seed {seed}": seed for seed in range(seeds)}
        for name in rows.missing(names, only):
            rows.add(name, measured([*overrides, f"seed={names[name]}"]))
            print(name, rows.rows[name], flush=True)


if __name__ == "__main__":
    run(main)
