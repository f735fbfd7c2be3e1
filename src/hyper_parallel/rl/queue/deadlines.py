"""Deadlines of items: in how many batches from now an item is stale beyond the bound, and whether all fit.

A batch of B items is trained by U consecutive optimizer updates. Counted from version b, at which the next batch
starts, batch k (k = 0 is the next one) has its last update at version

    last(k) = b + k U + U - 1                                                     (as long as no update is skipped)

and an item whose oldest token is of version o may be in batch k if last(k) - o <= η, which is k <= slack(o) with

    slack(o) = floor((η - U + 1 - (b - o)) / U)                                   `slack`

It is negative if even the next batch is too late. Items with deadlines can all be trained in time, B in each batch,
if and only if (earliest deadline first; Jackson 1955)

    for all k >= 0: the number of items with slack <= k is at most (k + 1) B      `feasible`

and n further items of slack s keep that true if and only if n <= min over k >= s of (k + 1) B - that number (`room`).
Fewer updates than U (one that was skipped) only make items less stale than planned.
"""

from __future__ import annotations

from collections.abc import Mapping


def slack(oldest: int, start: int, bound: int, updates: int) -> int:
    """How many batches after the next one an item may still wait; negative: it cannot be trained any more.

    `oldest`: the version of its oldest token. `start`: the version at which the next batch starts.
    """
    return (bound - updates + 1 - (start - oldest)) // updates


def feasible(counts: Mapping[int, int], batch: int) -> bool:
    """Whether items can all be trained in time. `counts`: how many items have each slack."""
    total = 0
    for value in sorted(counts):
        total += counts[value]
        if counts[value] and total > max(0, value + 1) * batch:
            return False
    return True


def room(counts: Mapping[int, int], new: int, batch: int) -> int:
    """How many items of slack `new` can be added so that all can still be trained in time."""
    if new < 0:
        return 0
    total = sum(count for value, count in counts.items() if value <= new)
    free = (new + 1) * batch - total
    for value in sorted(value for value in counts if value > new):
        total += counts[value]
        free = min(free, (value + 1) * batch - total)
    return max(0, free)
