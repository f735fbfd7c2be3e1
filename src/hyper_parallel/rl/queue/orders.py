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

from hyper_parallel.rl.queue import deadlines


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
        counts[deadlines.slack(version, start + updates, bound, updates)] += count
    return not missing and deadlines.feasible(counts, batch)


def earliest(oldest: Mapping[int, int], batch: int) -> Sequence[int]:
    """The tickets of the earliest deadlines; of equal ones, those that finished first. `oldest`: as in `fifo`."""
    return list(islice(sorted(oldest, key=oldest.__getitem__), batch))
