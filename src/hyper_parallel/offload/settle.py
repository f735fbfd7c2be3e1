"""Leaves found by running the step: who is stored leaves, and only who must leave is waited for.

Stores are first in, first out on their link, so that those that began first are over first; what is asked for is
bytes, whoever's they are. So the one to wait for is always the next that is over. Two steps are run, and the second
one counts, in which copies of the first may still be under way.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from math import inf

import numpy as np

from hyper_parallel.offload.gaps import Ints
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
    eventful = {*fetch, *begin, *use}
    # The store that is over next, when that is, and the place before which it must have left.
    head, soonest, gives_up = _next(under)
    for at in range(2 * n):
        node = at if at < n else at - n
        event = node in eventful
        if event:
            for row in fetch.get(node, ()):
                if row in gone:
                    gone.discard(row)
                    away -= sizes[row]
            for row in begin.get(node, ()):
                space = spaces[row]
                out[space] = max(now, out[space]) + float(gaps.out[space, row])
                last = at + int(layout.fetch[row] - gaps.after[row]) - 1
                under[space].append(_Under(out[space], row, at, last))
                head, soonest, gives_up = _next(under)
        while head is not None and (soonest <= now or away < over[node] or at >= gives_up):
            under[spaces[head.row]].popleft()
            if at <= gives_up:
                now = max(now, soonest)
                gone.add(head.row)
                away += sizes[head.row]
                left[head.row] = int(gaps.after[head.row]) + at - head.begun
            head, soonest, gives_up = _next(under)
        if event:
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


def _next(under: list[deque[_Under]]) -> tuple[_Under | None, float, int]:
    """The store that is over next, with when that is and where it gives up; nobody is never over."""
    ready = [queue[0] for queue in under if queue]
    if not ready:
        return None, inf, 0
    found = ready[0] if len(ready) == 1 else min(ready, key=lambda one: (one.over, one.row))
    return found, found.over, found.gives_up


def _without(layout: Layout) -> Ints:
    """Live bytes at each node if nobody left who has to be stored."""
    gaps, n = layout.gaps, layout.gaps.nodes
    change = np.zeros(2 * n + 1, dtype=np.int64)
    rows = np.flatnonzero(layout.stores)
    np.add.at(change, layout.leave[rows], gaps.bytes[rows])
    np.subtract.at(change, layout.fetch[rows], gaps.bytes[rows])
    here = np.cumsum(change[: 2 * n])
    found: Ints = layout.live + here[:n] + here[n:]
    return found
