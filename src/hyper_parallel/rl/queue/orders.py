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
from collections.abc import Mapping, Sequence
from itertools import islice

from hyper_parallel.rl.queue import deadlines


def fifo(running: Mapping[int, int], oldest: Mapping[int, int], batch: int) -> Sequence[int] | None:
    """The tickets of the next batch, or None until it has finished.

    `running`: the version at which each unfinished ticket started. `oldest`: of each finished ticket, in the order in
    which they finished.
    """
    first = min(running, default=None)
    ready = sorted(ticket for ticket in oldest if first is None or ticket < first)
    return ready[:batch] if len(ready) >= batch else None


def window(
    running: Mapping[int, int], oldest: Mapping[int, int], batch: int, start: int, bound: int, updates: int
) -> Sequence[int] | None:
    """As `fifo`. `start`: the version at which the next batch starts; `bound`, `updates`: as in `deadlines.slack`."""
    chosen = discard(oldest, batch)
    if chosen is None:
        return None
    left = Counter(running.values())
    left.update(oldest.values())
    left.subtract(Counter(oldest[ticket] for ticket in chosen))
    # Relative to the batch after this one.
    counts = Counter[int]()
    for version, count in left.items():
        counts[deadlines.slack(version, start + updates, bound, updates)] += count
    return chosen if deadlines.feasible(counts, batch) else None


def discard(oldest: Mapping[int, int], batch: int) -> Sequence[int] | None:
    """As `fifo`."""
    if len(oldest) < batch:
        return None
    return list(islice(sorted(oldest, key=oldest.__getitem__), batch))
