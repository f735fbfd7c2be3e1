"""How close plans of memory come to the best possible: python benchmarks/offload_bounds.py [--layers N] [--small]

The step of a Llama of 8B's shape (sequence 4,096, bf16 arithmetic, fp32 parameters and moments) is captured on one
rank of H100s, with links to the host of 25, 50 and 400 GiB/s each way. For each link:

- the least budget at which the planner's step has no stall, found by bisection, against the linear program's bound;
- at three budgets between the working set and the peak, the foreseen time of a step against the bound, and how many
  seconds of a processor planning takes.

Then small instances (`--small`: these only): random problems of 20 to 60 storages on slow links, two sets of them, of
which the planner was made with the first only in view. Each plan stands beside two bounds: the linear program's with
memory asked for at every node, which splits storages, and a mixed-integer program's, which moves whole ones
(`harness.exact_milp`), as far as HiGHS proves it in `--seconds` of a processor: half of them for the best plan's time,
and, where that leaves it open, half for whether any plan is quicker by more than 3%. What lies between a plan and the
higher bound is the most that the best plan could gain.

Nothing here ran on such a machine: times are those of the planner's clock (`offloading.schedule.transfers.replay`),
simulated.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_8b
from measure import write

from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import BudgetError
from hyper_parallel.offloading import OffloadTier, Plan, Problem, Rate, build_problem, choose
from hyper_parallel.offloading.schedule.lower_bound import least_seconds, zero_stall_budget

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from harness.exact_milp import Exact
from harness.memory_problems import drawn, under

LINKS = (25, 50, 400)
"""GiB/s each way."""
SMALL = {"seen": range(40), "fresh": range(1000, 1040)}
"""Seeds of small ones."""
SLOWER = 3
"""Times the links of small instances, so that copies do not all hide."""
NEAR = 0.03
"""Of the bound."""
CERTAIN = 1e-3
"""Of a step: as near as this, plan and bound, or the solver's solution and its bound, are one."""
CLOSE = 1 / 512
"""Of the peak: how far the bisection of the least budget without stall goes."""


def timed(problem: Problem) -> tuple[Plan, float]:
    """The plan, and the seconds that finding it took."""
    begun = time.process_time()
    return choose(problem), time.process_time() - begun


def small(seed: int) -> Problem:
    """A random problem, with a budget between the working set and the middle."""
    draw = random.Random(seed)
    problem = drawn(seed, draw.randint(20, 60), draw.randint(40, 120))
    slow = [
        replace(
            space,
            out=replace(space.out, bandwidth=space.out.bandwidth / SLOWER),
            back=replace(space.back, bandwidth=space.back.bandwidth / SLOWER),
        )
        for space in problem.spaces
    ]
    return under(replace(problem, spaces=tuple(slow)), draw.uniform(0.0, 0.5))


def small_instances(limit: float, seeds: Iterable[int]) -> list[dict[str, float]]:
    """A plan of each and its bounds, proved in so many seconds of the solver's processor; printed too."""
    rows = []
    for seed in seeds:
        problem = small(seed)
        plan, took = timed(problem)
        linear = least_seconds(problem, places=problem.nodes)
        bound, closed = proved(problem, plan, linear, limit)
        rows.append(
            {
                "seed": seed,
                "storages": len(problem.held),
                "nodes": problem.nodes,
                "ours_s": plan.seconds,
                "bound_s": bound,
                "linear_s": linear,
                "closed": closed,
                "planning_s": took,
            }
        )
        print(
            f"  {len(problem.held)} storages, {problem.nodes} nodes: {plan.seconds:.5f} s a step, whole copies at "
            f"least {bound:.5f} s: {plan.seconds / bound - 1:+.2%}{'' if closed else ' (solver stopped)'}, "
            f"linear program {linear:.5f} s: {plan.seconds / linear - 1:+.2%}; planned in {took:.1f} s",
            flush=True,
        )
    closed_rows = [row for row in rows if row["closed"]]
    for name, what, some in (
        ("bound_s", "whole copies", rows),
        ("bound_s", "whole copies, of which the solver came to its end", closed_rows),
        ("linear_s", "linear program", rows),
    ):
        above = sorted(row["ours_s"] / row[name] - 1 for row in some)
        if not above:
            continue
        within = sum(one <= NEAR for one in above)
        print(
            f"small instances, {what}: {above[len(above) // 2]:+.2%} above the bound in the median, "
            f"{above[-1]:+.2%} at the most; {within} of {len(above)} within {NEAR:.0%}"
        )
    return rows


def small_sets(limit: float) -> None:
    """All of them, kept apart from the large one's result."""
    found: dict[str, Any] = {"solver_s": limit}
    for name, seeds in SMALL.items():
        print(f"{name}:", flush=True)
        found[name] = small_instances(limit, seeds)
    print(write("offload_bounds_small", found))


def proved(problem: Problem, plan: Plan, linear: float, limit: float) -> tuple[float, bool]:
    """Seconds that no plan is below, and whether the best of whole copies is known."""
    if plan.seconds <= linear * (1 + CERTAIN):
        return linear, True
    exact = Exact(problem)
    best = exact.solve(limit / 2, plan.moves, near=CERTAIN)
    # Each holds; where the solver was stopped early, the linear program's may be the higher one.
    bound = max(linear, best.bound)
    asked = plan.seconds / (1 + NEAR)
    if bound < asked and not best.closed:
        bound = max(bound, exact.solve(limit / 2, below=asked).bound)
    return bound, best.closed


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
    parser.add_argument("--small", action="store_true", help="only the small instances")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a processor, for each small instance")
    given = parser.parse_args()
    small_sets(given.seconds)
    if given.small:
        return
    base = build_problem(llama_8b.captured(given.layers), Cluster.named("h100"), 1, ())
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
        problem = replace(base, spaces=(OffloadTier("host", 2**40, rate, rate),))
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
        for share in llama_8b.SHARES:
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
