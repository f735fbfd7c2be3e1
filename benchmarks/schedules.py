"""Pipeline schedules against closed forms, lower bounds and an exact solver: python benchmarks/schedules.py

1. Bubbles of the named schedules on 16 ranks with 64 micro-batches, F = I = W = 1, and their closed forms.
2. `auto` on random instances (`--instances`): stage times uneven by up to 3×, transfers of up to 20% of a stage's
   forward pass, caps from 1F1B's own memory to none. Counted: instances where it is longer than the best named
   schedule that meets the caps, and the distance to the lower bound.
3. Seconds of a processor for 16 stages and 64 micro-batches.
4. Optimality on instances of 4 stages and 8 micro-batches, on 4 ranks and on 2, against CP-SAT of OR-tools,
   `--seconds` each, where that can be imported.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

from measure import write

from hyper_parallel.errors import StrategyError
from hyper_parallel.schedule import (
    Costs,
    ScheduleName,
    auto_schedule,
    makespan_bound,
    named_schedule,
    time_schedule,
)
from hyper_parallel.schedule.closed_forms import SPAN_BUBBLE, closed_form_bubble, closed_form_peak

RANKS = (2, 3, 4, 6, 8, 12, 16)
ROUNDS = (1, 2, 3, 4, 8)
"""Micro-batches for each rank."""
MOST = 64
"""Micro-batches."""


@dataclass(frozen=True)
class Instance:
    """One problem."""

    costs: Costs
    ranks: int
    micro_batches: int
    caps: tuple[float, ...]


def drawn(
    seed: int, ranks: int | None = None, micro_batches: int | None = None, parts: int | None = None
) -> Instance:
    """A random instance. Times are whole numbers, so that an exact solver has the same problem."""
    draw = random.Random(seed)
    ranks = ranks or draw.choice(RANKS)
    micro_batches = micro_batches or min(MOST, ranks * draw.choice(ROUNDS))
    parts = parts or draw.choice((1, 1, 2))
    stages = ranks * parts
    uneven = draw.uniform(1.0, 3.0)
    forward = [round(100 * draw.uniform(1.0, uneven)) for _ in range(stages)]
    input = [round(f * draw.uniform(0.8, 1.2)) for f in forward]
    weight = [round(f * draw.uniform(0.6, 1.0)) for f in forward]
    share = draw.uniform(0.0, 0.2)
    transfers = [round(draw.uniform(0.0, share) * sum(forward) / stages) for _ in range(stages - 1)]
    costs = Costs(
        forward=tuple(forward),
        backward=tuple(i + w for i, w in zip(input, weight, strict=True)),
        input=tuple(input),
        weight=tuple(weight),
        transfers=tuple(transfers),
        saved=tuple(round(10 * draw.uniform(1.0, uneven)) for _ in range(stages)),
    )
    own = time_schedule(named_schedule("1f1b", ranks, micro_batches), costs.merged(parts)).peaks
    level = draw.choice((0.0, 0.0, draw.random(), draw.random(), math.inf))
    caps = [math.inf if math.isinf(level) else peak + level * (2 * max(own) - peak) for peak in own]
    return Instance(costs, ranks, micro_batches, tuple(caps))


def best_named(instance: Instance) -> float:
    """Makespan of the shortest named schedule that meets the caps, as `named_schedule` gives it."""
    best = math.inf
    parts = instance.costs.stages // instance.ranks
    for name, merged in itertools.product(ScheduleName, {1, parts}):
        try:
            schedule = named_schedule(name, instance.ranks, instance.micro_batches, parts // merged)
        except StrategyError:
            continue
        timing = time_schedule(schedule, instance.costs.merged(merged))
        if all(p <= c * (1 + 1e-9) for p, c in zip(timing.peaks, instance.caps, strict=True)):
            best = min(best, timing.makespan)
    return best


def bubbles(ranks: int = 16, micro_batches: int = 64) -> list[dict[str, Any]]:
    """Measured and published, in units of one stage's F.

    dualpipev's closed form is of pairs of a forward and a backward pass that run as one task; here they run one after
    the other, and the forward pass's result leaves in between.
    """
    rows = []
    for name in ScheduleName:
        schedule = named_schedule(name, ranks, micro_batches)
        timing = time_schedule(schedule, Costs.even(schedule.stages))
        busy = 3.0 * micro_batches * schedule.stages / ranks
        whole = timing.longest_span if name in SPAN_BUBBLE else timing.makespan
        rows.append(
            {
                "schedule": str(name),
                "stages": schedule.stages,
                "bubble": whole - busy,
                "closed_form": closed_form_bubble(name, ranks, 1.0, 1.0, 1.0),
                "with_barrier": timing.makespan - busy,
                "peak": max(timing.peaks),
                "closed_form_peak": closed_form_peak(name, ranks, micro_batches),
            }
        )
        print(rows[-1])
    return rows


def spread(values: list[float]) -> dict[str, float]:
    """Median, mean, 95th percentile and largest."""
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "mean": statistics.fmean(ordered),
        "p95": ordered[int(0.95 * (len(ordered) - 1))],
        "max": ordered[-1],
    }


def against_named(count: int) -> dict[str, Any]:
    """`auto` on random instances."""
    longer = optimal = 0
    gaps, named_gaps, gains, seconds, tight = [], [], [], [], []
    for seed in range(count):
        instance = drawn(seed)
        begun = time.process_time()
        found = auto_schedule(instance.costs, instance.ranks, instance.micro_batches, instance.caps)
        seconds.append(time.process_time() - begun)
        timing = time_schedule(found.schedule, instance.costs)
        for held, cap in zip(timing.peaks, instance.caps, strict=True):
            assert held <= cap * (1 + 1e-9), (seed, held, cap)
        named = best_named(instance)
        longer += timing.makespan > named * (1 + 1e-9)
        gap = timing.makespan / found.bound - 1
        assert gap >= -1e-9, (seed, gap)
        gaps.append(gap)
        optimal += gap <= 1e-6
        if math.isfinite(named):
            named_gaps.append(named / found.bound - 1)
            gains.append(1 - timing.makespan / named)
        if math.isfinite(instance.caps[0]):
            tight.append(gap)
    result = {
        "instances": count,
        "longer_than_best_named": longer,
        "at_the_bound": optimal,
        "gap": spread(gaps),
        "gap_where_memory_is_limited": spread(tight),
        "gap_of_best_named": spread(named_gaps),
        "shorter_than_best_named": spread(gains),
        "cpu_seconds": spread(seconds),
    }
    print(result)
    return result


def planning_seconds(repeats: int) -> dict[str, Any]:
    """Of 16 stages and 64 micro-batches, one stage on each rank and two."""
    result = {}
    for ranks, parts in ((16, 1), (8, 2), (16, 2)):
        seconds = []
        for seed in range(repeats):
            instance = drawn(10_000 + seed, ranks, 64, parts)
            begun = time.process_time()
            auto_schedule(instance.costs, ranks, 64, instance.caps)
            seconds.append(time.process_time() - begun)
        result[f"{ranks} ranks, {ranks * parts} stages"] = spread(seconds)
    print(result)
    return result


def exact(instance: Instance, placement: tuple[int, ...], seconds: float, hint: float) -> tuple[float, float]:
    """The best makespan that CP-SAT finds with one placement, and its bound."""
    from ortools.sat.python import cp_model

    costs, count = instance.costs, instance.micro_batches
    stages = costs.stages
    horizon = int(hint)
    model = cp_model.CpModel()
    start: dict[tuple[int, int, int], Any] = {}
    by_rank: list[list[Any]] = [[] for _ in range(instance.ranks)]
    lives: list[list[tuple[Any, int]]] = [[] for _ in range(instance.ranks)]
    last = model.new_int_var(0, horizon, "makespan")
    times = (costs.forward, costs.input, costs.weight)
    for kind, s, m in itertools.product(range(3), range(stages), range(count)):
        begin = start[kind, s, m] = model.new_int_var(0, horizon, f"{kind} {s} {m}")
        length = int(times[kind][s])
        by_rank[placement[s]].append(model.new_fixed_size_interval_var(begin, length, ""))
        model.add(begin + length <= last)
        if m:
            model.add(begin >= start[kind, s, m - 1] + length)
    for s, m in itertools.product(range(stages), range(count)):
        if s:
            away = 0 if placement[s] == placement[s - 1] else int(costs.transfers[s - 1])
            model.add(start[0, s, m] >= start[0, s - 1, m] + int(costs.forward[s - 1]) + away)
            model.add(start[1, s - 1, m] >= start[1, s, m] + int(costs.input[s]) + away)
        model.add(start[1, s, m] >= start[0, s, m] + int(costs.forward[s]))
        model.add(start[2, s, m] >= start[1, s, m] + int(costs.input[s]))
        life = model.new_int_var(0, horizon, "")
        end = start[2, s, m] + int(costs.weight[s])
        lives[placement[s]].append(
            (model.new_interval_var(start[0, s, m], life, end, ""), int(costs.saved[s]))
        )
    for rank, cap in enumerate(instance.caps):
        model.add_no_overlap(by_rank[rank])
        if math.isfinite(cap):
            intervals, demands = zip(*lives[rank], strict=True)
            model.add_cumulative(list(intervals), list(demands), int(cap * (1 + 1e-9)))
    model.minimize(last)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        # Nothing as short as the schedule that set the horizon: there is none, or none was found in time.
        infeasible = status == cp_model.INFEASIBLE
        return math.inf, math.inf if infeasible else solver.best_objective_bound
    return solver.objective_value, solver.best_objective_bound


def against_exact(count: int, seconds: float, parts: int) -> dict[str, Any] | None:
    """`auto` on 4 stages and 8 micro-batches, `parts` stages on each rank, against the best of all placements."""
    try:
        import ortools
    except ImportError:
        print("OR-tools cannot be imported: the comparison with CP-SAT is left out")
        return None
    placements = [(0, 1, 2, 3)] if parts == 1 else [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0)]
    rows = []
    for seed in range(count):
        instance = drawn(20_000 + seed, 4 // parts, 8, parts)
        found = auto_schedule(instance.costs, 4 // parts, 8, instance.caps)
        row: dict[str, Any] = {"seed": seed, "auto": found.makespan, "bound": found.bound}
        best, proved = found.makespan, math.inf
        for placement in placements:
            bound = makespan_bound(instance.costs, placement, 8, instance.caps)
            if bound < best * (1 - 1e-6):
                # Nothing longer than what is known is looked for.
                value, solved = exact(instance, placement, seconds, best)
                best, bound = min(best, value), max(bound, min(solved, best))
            proved = min(proved, bound)
        row |= {"exact": best, "exact_bound": min(proved, best)}
        rows.append(row)
        print(row, flush=True)
    solved_rows = [row for row in rows if row["exact"] <= row["exact_bound"] * (1 + 1e-6)]
    result = {
        "ortools": ortools.__version__,
        "seconds_each": seconds,
        "ranks": 4 // parts,
        "instances": count,
        "at_our_bound": sum(row["auto"] <= row["bound"] * (1 + 1e-6) for row in rows),
        "optimum_proved": len(solved_rows),
        "auto_is_optimal": sum(row["auto"] <= row["exact"] * (1 + 1e-6) for row in solved_rows),
        "auto_over_best_known": spread([row["auto"] / row["exact"] - 1 for row in rows]),
        "our_bound_under_optimum": spread([1 - row["bound"] / row["exact"] for row in solved_rows]),
        "rows": rows,
    }
    print({key: value for key, value in result.items() if key != "rows"})
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--instances", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=20, help="of the planning time")
    parser.add_argument("--exact", type=int, default=40, help="instances for CP-SAT")
    parser.add_argument("--seconds", type=float, default=10.0, help="of CP-SAT for each instance")
    given = parser.parse_args()
    result = {
        "bubbles_16x64": bubbles(),
        "auto": against_named(given.instances),
        "planning_cpu_seconds": planning_seconds(given.repeats),
        "cp_sat_4x8": against_exact(given.exact, given.seconds, 1),
        "cp_sat_4x8_two_stages_on_each_rank": against_exact(given.exact // 2, given.seconds, 2),
    }
    print(write("schedules", result))


if __name__ == "__main__":
    main()
