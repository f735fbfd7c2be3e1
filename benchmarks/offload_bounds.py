"""How close plans of memory come to the best possible: python benchmarks/offload_bounds.py [--small]

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

Nothing here ran on such a machine: times are those of the planner's clock (`offloading.schedule.problem.replay`),
simulated.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from commandline import run
from measure import taken, write
from pages import Benchmark
from training import SHARES, llama_8b_step

from harness.exact_milp import Exact
from harness.memory_problems import drawn, under
from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import BudgetError
from hyper_parallel.offloading import OffloadTier, Plan, Problem, Rate, build_problem, choose
from hyper_parallel.offloading.schedule.lower_bound import least_seconds, zero_stall_budget

BENCHMARK = Benchmark("offload_bounds")
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


def small_problem(seed: int) -> Problem:
    """A random problem, with a budget between the working set and the middle."""

    def slower(rate: Rate) -> Rate:
        return replace(rate, bandwidth=rate.bandwidth / SLOWER)

    draw = random.Random(seed)
    problem = drawn(seed, draw.randint(20, 60), draw.randint(40, 120))
    slow = tuple(replace(one, out=slower(one.out), back=slower(one.back)) for one in problem.spaces)
    return under(replace(problem, spaces=slow), draw.uniform(0.0, 0.5))


def small_instances(limit: float, seeds: Iterable[int]) -> list[dict[str, float]]:
    """A plan of each and its bounds, proved in so many seconds of the solver's processor; printed too."""
    rows: list[dict[str, float]] = []
    for seed in seeds:
        problem = small_problem(seed)
        planning = taken(partial(choose, problem))
        plan: Plan = planning.result
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
                "planning_s": planning.processor,
            }
        )
        print(rows[-1], flush=True)
    summed("whole copies", "bound_s", rows)
    summed("whole copies, of which the solver came to its end", "bound_s", [r for r in rows if r["closed"]])
    summed("linear program", "linear_s", rows)
    return rows


def summed(what: str, bound: str, rows: Sequence[dict[str, float]]) -> None:
    """Say how far plans are above a bound."""
    off = sorted(row["ours_s"] / row[bound] - 1 for row in rows)
    if off:
        within = sum(one <= NEAR for one in off)
        print(
            f"small instances, {what}: {off[len(off) // 2]:+.2%} above the bound in the median, "
            f"{off[-1]:+.2%} at the most; {within} of {len(off)} within {NEAR:.0%}"
        )


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
            planning = taken(partial(choose, replace(problem, budget=middle)))
            seconds.append(planning.processor)
            stalls = planning.result.stall > 1e-6 * problem.starts[-1]
        except BudgetError:
            stalls = True
        low, high = (middle, high) if stalls else (low, middle)
    return high, seconds


def at_link(base: Problem, link: int) -> dict[str, Any]:
    """The large step over one link to the host."""
    peak, least, rate = max(base.profile()), base.working_set, Rate(1e-5, link * 2**30)
    problem = replace(base, spaces=(OffloadTier("host", 2**40, rate, rate),))
    bound = taken(partial(zero_stall_budget, problem))
    ours, planning_s = without_stall(problem, max(bound.result, least), peak)
    ratio = ours / bound.result
    zero_stall = {"bound": bound.result, "ours": ours, "ratio": ratio, "solver_s": bound.clock}
    print(f"{link} GiB/s:", zero_stall, flush=True)
    budgets = []
    for share in SHARES:
        asked = under(problem, share)
        planning, solved = taken(partial(choose, asked)), taken(partial(least_seconds, asked))
        plan: Plan = planning.result
        budgets.append(
            {
                "share": share,
                "budget": asked.budget,
                "peak": plan.peak,
                "ours_s": plan.seconds,
                "bound_s": solved.result,
                "ratio": plan.seconds / solved.result,
                "planning_s": planning.processor,
                "solver_s": solved.clock,
                "moves": len(plan.moves),
            }
        )
        print(budgets[-1], flush=True)
    return {"zero_stall": zero_stall, "budgets": budgets, "planning_s": planning_s}


def main(
    small: Annotated[bool, "only the small instances"] = False,
    seconds: Annotated[float, "of a processor, for each small instance"] = 20.0,
) -> None:
    """Run, print, keep; the small ones apart from the large one's result."""
    instances: dict[str, Any] = {"solver_s": seconds}
    for name, seeds in SMALL.items():
        print(f"{name}:", flush=True)
        instances[name] = small_instances(seconds, seeds)
    print(write("offload_bounds_small", instances))
    if small:
        return
    base = build_problem(llama_8b_step(), Cluster.named("h100"), 1, ())
    found = {
        "nodes": base.nodes,
        "storages": len(base.held),
        "peak": max(base.profile()),
        "working_set": base.working_set,
        "step_s": base.starts[-1],
    }
    print(found, flush=True)
    BENCHMARK.keep({**found, "links": {str(link): at_link(base, link) for link in LINKS}})


if __name__ == "__main__":
    run(main)
