"""The three orders of training: which finished items make the next batch, if any do yet.

    fifo      the items that started first. An item that is still running holds up its batch.
    window    the finished items of the earliest deadlines (earliest deadline first, as versions go), as soon as all
              others, finished or not, can still be trained in time. Only an item that must not miss the batch is
              waited for.
    discard   the same items without that condition. Items that miss their deadline are dropped.

With S = slack of an item that starts now (`deadlines.slack`), each order admits items while at most (S + 1) B have
started and were not trained (`room`). That number alone bounds nothing: trained in the order in which they finish, an
item that takes long is overtaken by any number of later ones. The order has to hold the bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import islice


def fifo(running: Collection[int], finished: Collection[int], batch: int) -> Sequence[int] | None:
    """The tickets of the next batch, or None until all of it has finished. Both collections are of tickets."""
    first = min(running, default=None)
    ready = [ticket for ticket in finished if first is None or ticket < first]
    return sorted(ready)[:batch] if len(ready) >= batch else None


def window(
    versions: Mapping[int, int],
    finished: Mapping[int, int],
    batch: int,
    *,
    start: int,
    bound: int,
    updates: int,
) -> bool:
    """Whether the `batch` finished items of the earliest deadlines can be trained now, and all others in time.

    `versions`: how many items, running and finished, are of each oldest version; `finished`: those that finished.
    `start`: the version at which the batch starts; `bound`, `updates`: as in `deadlines.slack`.
    """
    left, missing = dict(versions), batch
    for version in sorted(finished):
        chosen = min(missing, finished[version])
        left[version] -= chosen
        missing -= chosen
    counts = Counter[int]()
    for version, count in left.items():
        # Relative to the batch after this one.
        counts[slack(version, start + updates, bound, updates)] += count
    return not missing and feasible(counts, batch)


def earliest(oldest: Mapping[int, int], batch: int) -> Sequence[int]:
    """The tickets of the earliest deadlines; of equal ones, those that finished first. `oldest`: as in `fifo`."""
    return list(islice(sorted(oldest, key=oldest.__getitem__), batch))


# Deadlines of items: in how many batches from now an item is stale beyond the bound, and whether all fit.
#
# A batch of B items is trained by U consecutive optimizer updates. Counted from version b, at which the next batch
# starts, batch k (k = 0 is the next one) has its last update at version
#
#     last(k) = b + k U + U - 1                                                     (as long as no update is skipped)
#
# and an item whose oldest token is of version o may be in batch k if last(k) - o <= η, which is k <= slack(o) with
#
#     slack(o) = floor((η - U + 1 - (b - o)) / U)                                   `slack`
#
# It is negative if even the next batch is too late. Items with deadlines can all be trained in time, B in each batch,
# if and only if (earliest deadline first; Jackson 1955)
#
#     for all k >= 0: the number of items with slack <= k is at most (k + 1) B      `feasible`
#
# and n further items of slack s keep that true if and only if n <= min over k >= s of (k + 1) B - that number (`room`).
# Fewer updates than U (one that was skipped) only make items less stale than planned.


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
