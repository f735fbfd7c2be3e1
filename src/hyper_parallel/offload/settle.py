"""Leaves found by running the step: who is stored leaves, and only who must leave is waited for.

Stores are first in, first out on their link, so that those that began first are over first; what is asked for is
bytes, whoever's they are. So the one to wait for is always the next that is over. Two steps are run, and the second
one counts, in which copies of the first may still be under way.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

import numpy as np

from hyper_parallel.offload.layout import Layout
from hyper_parallel.offload.problem import Problem


@dataclass(frozen=True, slots=True)
class _Under:
    """A store under way."""

    over: float
    row: int
    begun: int
    """Place, of the steps run so far."""
    gives_up: int
    """The place before which it must have left, if it is to leave."""


def settle(problem: Problem, layout: Layout) -> bool:
    """Set the leaves of `layout`; False, and nothing changes, where that would break the budget."""
    gaps, n = layout.gaps, layout.gaps.nodes
    stores, rows = layout.stores, layout.rows
    begin: dict[int, list[int]] = defaultdict(list)
    fetch: dict[int, list[int]] = defaultdict(list)
    use: dict[int, list[int]] = defaultdict(list)
    for row in sorted(rows.tolist(), key=lambda row: (int(gaps.used[row] - layout.fetch[row]), row)):
        fetch[int(layout.fetch[row]) % n].append(row)
        use[int(gaps.first_use[row])].append(row)
    for row in sorted(rows[stores[rows]].tolist(), key=lambda row: (int(gaps.used[row]), row)):
        begin[int(gaps.after[row]) % n].append(row)
    over = (_without(layout) - layout.budget).tolist()
    sizes, spaces = gaps.bytes.tolist(), layout.chosen.space.tolist()
    seconds = np.diff(problem.starts).tolist()
    under: list[deque[_Under]] = [deque() for _ in problem.spaces]
    out, back = [0.0] * len(under), [0.0] * len(under)
    left: dict[int, int] = {}
    here: dict[int, float] = {}
    """Of each row, when its fetch is over."""
    gone: set[int] = set()
    away, now = 0, 0.0
    for at in range(2 * n):
        node = at % n
        for row in fetch.get(node, ()):
            if row in gone:
                gone.discard(row)
                away -= sizes[row]
        for row in begin.get(node, ()):
            space = spaces[row]
            out[space] = max(now, out[space]) + float(gaps.out[space, row])
            last = at + int(layout.fetch[row] - gaps.after[row]) - 1
            under[space].append(_Under(out[space], row, at, last))
        while True:
            ready = [queue[0] for queue in under if queue]
            if not ready:
                break
            soonest = min(ready, key=lambda one: (one.over, one.row))
            if not (soonest.over <= now or away < over[node] or at >= soonest.gives_up):
                break
            under[spaces[soonest.row]].popleft()
            if at > soonest.gives_up:
                continue
            now = max(now, soonest.over)
            gone.add(soonest.row)
            away += sizes[soonest.row]
            left[soonest.row] = int(gaps.after[soonest.row]) + at - soonest.begun
        for row in fetch.get(node, ()):
            space = spaces[row]
            here[row] = back[space] = max(now, back[space]) + float(gaps.back[space, row])
        for row in use.get(node, ()):
            now = max(now, here.get(row, 0.0))
        now += seconds[node]
    was = layout.leave.copy()
    for row, place in left.items():
        layout.leave[row] = place
    layout.count()
    if layout.fits():
        return True
    layout.leave[:] = was
    layout.count()
    return False


def _without(layout: Layout) -> np.ndarray:
    """Live bytes at each node if nobody left who has to be stored."""
    gaps, n = layout.gaps, layout.gaps.nodes
    change = np.zeros(2 * n + 1, dtype=np.int64)
    rows = np.flatnonzero(layout.stores)
    np.add.at(change, layout.leave[rows], gaps.bytes[rows])
    np.subtract.at(change, layout.fetch[rows], gaps.bytes[rows])
    here = np.cumsum(change[: 2 * n])
    found: np.ndarray = layout.live + here[:n] + here[n:]
    return found
