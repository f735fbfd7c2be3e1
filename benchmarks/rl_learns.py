"""Does reinforcement learning learn? python benchmarks/rl_learns.py [--only TEXT] [--seeds N] [--again]

examples/rl/grpo-sort.yaml and its variants, each from several seeds: rewards of 1,000 held-out prompts before the first
step and at the end of training (not at its peak), sampled at temperature 1 and greedy. Writes
benchmarks/results/rl_learns.json after each run, and the table of docs/rl.md; runs that the result has are left out
unless `--again` is given.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measure import RESULTS, write
from pages import DOCS, put

from hyper_parallel.config.rl_run import load_rl
from hyper_parallel.rl.run import run

NAME = "rl_learns"
EXAMPLE = Path(__file__).parents[1] / "examples" / "rl" / "grpo-sort.yaml"
DESCEND = ("task.name=descend", "warmup.until=0.2", "rl.steps=100")
CASES: dict[str, tuple[str, ...]] = {
    "grpo, sort, η = 1": (),
    "grpo, sort, η = 0": ("rl.staleness=0",),
    "grpo, sort, η = 2": ("rl.staleness=2",),
    "grpo, sort, η = 4": ("rl.staleness=4",),
    "grpo, descend": DESCEND,
    "rloo, sort": ("rl.algorithm=rloo",),
    "ppo, sort": ("rl.algorithm=ppo", "rl.minibatches=4", "rl.staleness=0", "rl.optimizer.lr=2.0e-4"),
    "grpo, sort, shuffled rewards": ("task.shuffle_rewards=true", "rl.steps=100"),
}
"""The overrides of each."""
SEEDS = dict.fromkeys(
    ("grpo, sort, η = 1", "grpo, sort, η = 0", "grpo, sort, η = 2", "grpo, sort, η = 4", "grpo, descend"), 5
)


def main() -> int:
    """Run what is missing; the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--seeds", type=int, help="of each case, instead of 5 or 1")
    parser.add_argument("--again", action="store_true")
    given = parser.parse_args()
    path = RESULTS / f"{NAME}.json"
    rows: dict[str, Any] = json.loads(path.read_text())["runs"] if path.exists() and not given.again else {}
    for case, overrides in CASES.items():
        for seed in range(given.seeds or SEEDS.get(case, 1)):
            name = f"{case}, seed {seed}"
            if given.only in case and name not in rows:
                rows[name] = measured([*overrides, f"seed={seed}"])
                write(NAME, {"runs": rows, "cases": summary(rows)})
                print(name, rows[name], flush=True)
    for line in (lines := list(page(rows))):
        print(line)
    put(DOCS / "rl.md", f"{NAME}.py", lines)
    return 0


def measured(overrides: list[str]) -> dict[str, Any]:
    """One run from the start."""
    with tempfile.TemporaryDirectory(prefix="hyper-parallel-") as folder:
        began = time.monotonic()
        found = run(load_rl(EXAMPLE, [*overrides, f"out={folder}/run", "trackers=[]"]))
        seconds = time.monotonic() - began
        records = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").open()]
    trained = [one for one in records if "reward" in one]
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


def summary(rows: dict[str, Any]) -> dict[str, Any]:
    """Over the seeds of each case."""
    found = {}
    for case in CASES:
        own = [row for name, row in rows.items() if name.rpartition(", seed ")[0] == case]
        if own:
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


def page(rows: dict[str, Any]) -> Iterator[str]:
    """The table: of drawn answers the least, the mean and the most over the seeds."""
    yield "| Run | Seeds | Drawn: before | at the end | Greedy: before | at the end | Equal groups | Gap |"
    yield "|---|---|---|---|---|---|---|---|"
    for case, found in summary(rows).items():
        own = [row for name, row in rows.items() if name.rpartition(", seed ")[0] == case]
        equal = sum(row["groups_without_variance"] for row in own) / sum(row["groups"] for row in own)
        gap = max(row["largest_gap"] for row in own)
        cells = [
            " / ".join(f"{found[f'{metric} {when}'][key]:.3f}" for key in ("least", "mean", "most"))
            if len(own) > 1
            else f"{found[f'{metric} {when}']['mean']:.3f}"
            for metric in ("sampled", "greedy")
            for when in ("before", "after")
        ]
        yield f"| {case} | {len(own)} | {' | '.join(cells)} | {equal:.0%} | {gap:.2f} |"


if __name__ == "__main__":
    sys.exit(main())
