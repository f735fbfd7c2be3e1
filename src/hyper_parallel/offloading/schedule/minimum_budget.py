"""Minimum feasible budget, and the message for a smaller one.

Where the spaces have room for everything, all that is not in use at a node may be away there, so that the floor is the
working set. Otherwise it is the least budget, found by bisection, at which a sweep over the nodes finds room for what
must be away: at the first node that exceeds, the gap with the farthest next use goes (Belady 1966), if there is room.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hyper_parallel.errors import BudgetError
from hyper_parallel.offloading.schedule.array_types import Ints
from hyper_parallel.offloading.schedule.idle_intervals import Gaps
from hyper_parallel.offloading.schedule.problem import Problem
from hyper_parallel.offloading.schedule.selection import Chosen
from hyper_parallel.offloading.schedule.transfer_layout import Layout
from hyper_parallel.units import format_bytes

STEPS = 16
"""Of the bisection: to within a 65,536th of what lies between the working set and the peak."""
SHOWN = 5
"""Storages that a message names."""


@dataclass(frozen=True)
class Floor:
    """The least budget that this planner can meet."""

    bytes: int
    chosen: Chosen
    """Gaps that meet it, when each is away as long as it can be."""


def floor_of(problem: Problem, gaps: Gaps, base: Ints) -> Floor:
    """The floor; the budget of the problem does not matter."""
    everything = Chosen(problem, gaps)
    order = np.lexsort((np.arange(len(gaps)), -gaps.bytes)).tolist()
    if problem.spaces and all(everything.add(row) for row in order):
        return Floor(problem.working_set, everything)
    least, most = problem.working_set, int(base.max(initial=0))
    best = Floor(most, Chosen(problem, gaps))
    for _ in range(STEPS):
        if least >= most or not problem.spaces:
            break
        middle = (least + most) // 2
        found = _sweep(problem, gaps, base, middle)
        if found is None:
            least = middle + 1
        else:
            most = found.live.peak
            best = Floor(most, found.chosen)
    return best


def farthest(gaps: Gaps, base: Ints, budget: int, chosen: Chosen) -> Layout:
    """Every chosen gap away for as long as it can be."""
    return Layout(gaps, base, budget, chosen, gaps.after.copy(), gaps.used.copy())


def _sweep(problem: Problem, gaps: Gaps, base: Ints, budget: int) -> Layout | None:
    layout = farthest(gaps, base, budget, Chosen(problem, gaps))
    n, node = gaps.nodes, 0
    open_ = ~gaps.must
    while True:
        node = layout.live.first_over(node, n, budget)
        if node >= n:
            return layout
        at = np.where(gaps.after <= node, node, node + n)
        rows = np.flatnonzero(open_ & (gaps.after <= at) & (at < gaps.used))
        if not rows.size:
            return None
        row = int(rows[np.lexsort((rows, -gaps.bytes[rows], at[rows] - gaps.used[rows]))[0]])
        open_[row] = False
        layout.join(row, int(gaps.after[row]), int(gaps.used[row]))


def refusal(problem: Problem, floor: int) -> BudgetError:
    """Why a budget cannot be met, and what would do."""
    needed = problem.needed()
    working_set = max(needed, default=0)
    lines = [
        f"the budget of {format_bytes(problem.budget)} is too small for this step: at least {floor:,} bytes "
        f"({format_bytes(floor)}) are needed",
        f"{format_bytes(working_set)} are in use at once, below which no plan comes: "
        f"{', '.join(_in_use(problem, needed.index(working_set), working_set))}",
    ]
    if floor > working_set:
        lines.append(
            f"{format_bytes(floor - working_set)} more stay on the device because other memory has no room for them "
            f"({_rooms(problem)}), and with that much more of it the least would do"
        )
    why = "; ".join(lines)
    lines.append(
        f"set memory.device to {format_bytes(floor)} or more, or make the step smaller, for example by "
        "train.micro_batch or train.loss.chunk"
    )
    return BudgetError("; ".join(lines), why, floor)


def no_room(problem: Problem) -> BudgetError:
    """Why the updates of a problem cannot run on the host."""
    count = len(problem.updates)
    return BudgetError(
        f"the updates of {count} parameter{'s' if count > 1 else ''} are to run on the host, and beside their state "
        f"other memory has too little room for parameters and gradients ({_rooms(problem)}); set memory.host higher, "
        "or memory.update to auto or device"
    )


def _rooms(problem: Problem) -> str:
    return ", ".join(f"{space.name} {format_bytes(space.bytes)}" for space in problem.spaces) or "none"


def _in_use(problem: Problem, node: int, working_set: int) -> list[str]:
    """What is there at a node whatever the plan, the largest first."""
    there = [
        held for held in problem.held if any(first <= node < end for first, end in held.pinned(problem.nodes))
    ]
    there.sort(key=lambda held: (-held.bytes, held.storage))
    shown = [held for held in there[:SHOWN] if held.bytes >= working_set / 100]
    listed = [f"{held.name or 'a tensor'} ({held.kind}, {format_bytes(held.bytes)})" for held in shown]
    others = there[len(shown) :]
    if others:
        listed.append(f"{len(others)} more ({format_bytes(sum(held.bytes for held in others))})")
    workspace = sum(taken.bytes for taken in problem.taken if taken.first <= node <= taken.last)
    if workspace:
        listed.append(f"workspaces ({format_bytes(workspace)})")
    return listed
