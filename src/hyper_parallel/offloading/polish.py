"""Places of a small plan changed a few at a time, each change judged by running the step.

`places` finds places from times, and cannot see what another order of a few copies would bring where nodes wait for
most of them. Here a change is drawn (a move begins, leaves or comes back elsewhere, a gap is given up or taken), mended
where it breaks the budget, and `replay`ed. From a step that is slower by d seconds it is gone on with the probability

    exp(−d / warmth),   warmth = WARMTH · seconds of the best step · (share of the tries that are left)²

(simulated annealing: Kirkpatrick, Gelatt and Vecchi, Science 220, 1983). The draws are the same every time.
"""

from __future__ import annotations

import math
import random

import numpy as np

from hyper_parallel.offloading.layout import Layout
from hyper_parallel.offloading.moves import Replayed, replay
from hyper_parallel.offloading.problem import Problem

WARMTH = 0.003
ROUNDS = 6
"""Times that it is as warm as at first again, and gone on from the best."""
SHIFTS = (1, 1, 2, 3, 5, 12)
"""Places that a move's begin, leave or fetch is shifted by."""
MENDS = 8
"""Absences that are made longer, or taken, to mend a change, at most."""
TAKEN = 0.25
"""Share of those that are taken."""
OTHER = 0.1
"""Share of the changes that give a gap up, or take one."""


def polish(
    problem: Problem, layout: Layout, replayed: Replayed, tries: int, enough: float = 0.0
) -> tuple[Layout, Replayed]:
    """The quickest layout within the budget that is found in so many tries; the one given where none is quicker.

    `enough`: seconds of stall of which no less is sought. `layout` meets the budget and is left as it is.
    """
    draw = random.Random(0)
    best, least = layout, replayed
    for _ in range(ROUNDS):
        here, now = best, least
        for turn in range(tries // ROUNDS):
            if least.stall <= enough:
                return best, least
            there = here.copy()
            for _ in range(draw.choice((1, 1, 2, 3))):
                _change(there, draw)
            if not _mend(there, draw):
                continue
            then = replay(problem, there.moves(problem))
            slower = then.seconds - now.seconds
            warmth = WARMTH * least.seconds * (1 - turn * ROUNDS / tries) ** 2
            if slower <= 0 or draw.random() < math.exp(-slower / warmth):
                here, now = there, then
            if then.seconds < least.seconds:
                best, least = there, then
    return best, least


def _change(layout: Layout, draw: random.Random) -> None:
    """Shift a place of one move, or give a gap up, or take one."""
    gaps = layout.gaps
    if draw.random() < OTHER:
        row = draw.randrange(len(gaps))
        if not layout.chosen.flags[row]:
            _take(layout, draw, row, draw.randint(int(gaps.after[row]), int(gaps.until[row])))
        elif not gaps.must[row]:
            layout.drop(row)
        return
    rows = layout.rows
    if not rows.size:
        return
    row = int(rows[draw.randrange(rows.size)])
    by = draw.choice((-1, 1)) * draw.choice(SHIFTS)
    leave, fetch = int(layout.leave[row]), int(layout.fetch[row])
    match draw.randrange(3):
        case 0:
            last = min(int(gaps.until[row]), fetch - 1)
            layout.leave_at(row, min(max(leave + by, int(gaps.after[row])), last))
        case 1:
            first = max(int(gaps.since[row]), leave + 1)
            layout.fetch_at(row, min(max(fetch + by, first), int(gaps.used[row])))
        case _:
            layout.store[row] = min(max(int(layout.store[row]) + by, int(gaps.open[row])), leave)


def _take(layout: Layout, draw: random.Random, row: int, place: int) -> None:
    """Choose one more gap, of which a storage is away at a place at least; nothing changes where no space has room."""
    gaps = layout.gaps
    after, used = int(gaps.after[row]), int(gaps.used[row])
    leave = draw.choice((place, draw.randint(after, place)))
    fetch = draw.choice((used, draw.randint(max(place + 1, int(gaps.since[row])), used)))
    if layout.join(row, leave, fetch):
        layout.store[row] = draw.choice((int(gaps.open[row]), after))


def _mend(layout: Layout, draw: random.Random) -> bool:
    """Bring every node under the budget; False where that takes too much."""
    gaps, n = layout.gaps, layout.gaps.nodes
    for _ in range(MENDS):
        over = np.flatnonzero(layout.live > layout.budget)
        if not over.size:
            return True
        node = int(over[0])
        at = np.where(gaps.after <= node, node, node + n)
        flags = layout.chosen.flags
        if draw.random() < TAKEN:
            rows = np.flatnonzero((at <= gaps.until) & ~flags)
            if rows.size:
                row = int(rows[draw.randrange(rows.size)])
                _take(layout, draw, row, int(at[row]))
                continue
        late = flags & (at <= gaps.until) & (at < layout.leave)
        early = flags & (at >= layout.fetch) & (at < gaps.used)
        rows = np.flatnonzero(late | early)
        if not rows.size:
            return False
        row = int(rows[draw.randrange(rows.size)])
        if late[row]:
            layout.leave_at(row, int(at[row]))
        else:
            layout.fetch_at(row, int(at[row]) + 1)
    return layout.fits()
