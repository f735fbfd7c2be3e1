"""How close plans of memory come to the best possible: python benchmarks/offload_bounds.py [--layers N]

The step of a Llama of 8B's shape (sequence 4,096, bf16 arithmetic, fp32 parameters and moments) is captured on one
rank of H100s, with links to the host of 25, 50 and 400 GiB/s each way. For each link:

- the least budget at which the planner's step has no stall, found by bisection, against the linear program's bound;
- at three budgets between the working set and the peak, the foreseen time of a step against the bound, and how long
  planning takes.

Nothing here ran on such a machine: times are those of the planner's clock (`offload.moves.replay`), simulated.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

from capture import CASES
from measure import write
from memory import build, recipe_of

import hyper_parallel as hp
from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import BudgetError
from hyper_parallel.offload import Plan, Problem, Rate, Space, choose, problem_of
from hyper_parallel.offload.bound import least_seconds, zero_stall_budget
from hyper_parallel.train.whole_step import BatchShape, capture_step

LINKS = (25, 50, 400)
"""GiB/s each way."""
SHARES = (0.3, 0.5, 0.7)
"""Where the budgets lie between the working set and the peak."""
SEQUENCE = 4096
CLOSE = 1 / 512
"""Of the peak: how far the bisection of the least budget without stall goes."""


def problem_of_8b(layers: int | None) -> Problem:
    """The step's memory; budget and spaces are still to be said."""
    model = dict(CASES["Llama-3-8B, tensor 8 · shard 8"].model)
    model["num_hidden_layers"] = layers or model["num_hidden_layers"]
    recipe = recipe_of(build(model, hp.Strategy.model_validate({"precision": {"compute": "bfloat16"}})))
    step = capture_step(recipe, BatchShape(((1, SEQUENCE),), (False,)))
    return problem_of(step, Cluster.named("h100"), 1, ())


def timed(problem: Problem) -> tuple[Plan, float]:
    """The plan, and the seconds that finding it took."""
    begun = time.perf_counter()
    return choose(problem), time.perf_counter() - begun


def without_stall(problem: Problem, low: int, high: int) -> tuple[int, list[float]]:
    """The least budget at which the planner has no stall, to `CLOSE` of the peak; and seconds of each plan."""
    seconds = []
    while high - low > CLOSE * max(problem.profile()):
        middle = (low + high) // 2
        try:
            plan, took = timed(replace(problem, budget=middle))
            seconds.append(took)
            stalls = plan.stall > 1e-6 * problem.starts[-1]
        except BudgetError:
            stalls = True
        low, high = (middle, high) if stalls else (low, middle)
    return high, seconds


def main() -> None:
    """Run, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, help="of the 32")
    given = parser.parse_args()
    base = problem_of_8b(given.layers)
    peak, least = max(base.profile()), base.working_set
    print(
        f"{base.nodes:,} nodes, {len(base.held):,} storages, peak {peak / 2**30:.1f} GiB, working set "
        f"{least / 2**30:.2f} GiB, {base.starts[-1]:.3f} s a step (simulated)",
        flush=True,
    )
    found: dict[str, Any] = {
        "nodes": base.nodes,
        "storages": len(base.held),
        "peak": peak,
        "working_set": least,
        "step_s": base.starts[-1],
        "links": {},
    }
    for link in LINKS:
        rate = Rate(1e-5, link * 2**30)
        problem = replace(base, spaces=(Space("host", 2**40, rate, rate),))
        begun = time.perf_counter()
        bound = zero_stall_budget(problem)
        solved = time.perf_counter() - begun
        ours, planning = without_stall(problem, max(bound, least), peak)
        row: dict[str, Any] = {
            "zero_stall": {"bound": bound, "ours": ours, "ratio": ours / bound, "solver_s": solved},
            "budgets": [],
            "planning_s": planning,
        }
        print(
            f"{link} GiB/s: no stall from {ours / 2**30:.2f} GiB, bound {bound / 2**30:.2f} GiB: "
            f"{ours / bound - 1:+.2%} (solved in {solved:.0f} s)",
            flush=True,
        )
        for share in SHARES:
            asked = replace(problem, budget=int(least + share * (peak - least)))
            plan, took = timed(asked)
            begun = time.perf_counter()
            seconds = least_seconds(asked)
            solved = time.perf_counter() - begun
            row["budgets"].append(
                {
                    "share": share,
                    "budget": asked.budget,
                    "peak": plan.peak,
                    "ours_s": plan.seconds,
                    "bound_s": seconds,
                    "ratio": plan.seconds / seconds,
                    "planning_s": took,
                    "solver_s": solved,
                    "moves": len(plan.moves),
                }
            )
            print(
                f"  {asked.budget / 2**30:.1f} GiB: {plan.seconds:.3f} s a step, bound {seconds:.3f} s: "
                f"{plan.seconds / seconds - 1:+.2%}; planned in {took:.1f} s, bound in {solved:.0f} s",
                flush=True,
            )
        found["links"][str(link)] = row
    print(write("offload_bounds", found))


if __name__ == "__main__":
    main()
