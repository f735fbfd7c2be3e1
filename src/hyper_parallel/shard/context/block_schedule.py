"""Block schedule of ring attention: which query and key blocks are computed, and with which mask.

A query at q sees a key at k when k ≤ q, when k > q − window where there is a window, and when both are of one document.
Of two intervals of positions this leaves nothing, everything, the causal half, or what only a mask can tell. The last
are halved until they are small, so that what is nothing or everything in them is found.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.layout.layout import Interval
from hyper_parallel.shard.context.position_split import position_chunks

Relation = Literal["full", "causal", "masked"]

TILE = 2048
"""The longest side of a block that is computed with a mask: a mask of it has 4 MiB."""


@dataclass(frozen=True)
class AttentionBlock:
    """Queries and keys, as intervals of the tensors at hand and of positions, where these are one interval."""

    queries: Interval
    keys: Interval
    relation: Relation
    query_positions: Interval
    key_positions: Interval

    @property
    def work(self) -> float:
        """Scores computed: all of them, or half of a causal block."""
        area = (self.queries[1] - self.queries[0]) * (self.keys[1] - self.keys[0])
        return area / 2 if self.relation == "causal" else area


@dataclass(frozen=True, eq=False)
class Documents:
    """The document of each position, int64 [B, S] on the host, never falling along the positions.

    Keys that nobody may see (padding at the end) are of a document that no query is of.
    """

    queries: NDArray[np.int64]
    keys: NDArray[np.int64]

    def together(self, queries: Interval, keys: Interval) -> bool | None:
        """Whether in every row all of both are of one document (True), nothing is (False), or neither (None)."""
        if self is UNKNOWN:
            return None
        first_q, last_q = self.queries[:, queries[0]], self.queries[:, queries[1] - 1]
        first_k, last_k = self.keys[:, keys[0]], self.keys[:, keys[1] - 1]
        if bool(((last_q < first_k) | (last_k < first_q)).all()):
            return False
        if bool(((first_q == last_q) & (first_k == last_k) & (first_q == first_k)).all()):
            return True
        return None


UNKNOWN = Documents(np.zeros((0, 0), np.int64), np.zeros((0, 0), np.int64))
"""Documents that only a run knows: a mask tells them apart wherever causality and the window leave anything to see."""


def relation(
    queries: Interval, keys: Interval, window: int | None, documents: Documents | None
) -> Relation | None:
    """What queries at an interval of positions see of keys at another; None when they see nothing."""
    (q0, q1), (k0, k1) = queries, keys
    if k0 > q1 - 1 or (window is not None and k1 - 1 <= q0 - window):
        return None
    together = documents.together(queries, keys) if documents is not None else True
    if together is False:
        return None
    if together is None or (window is not None and k0 <= q1 - 1 - window):
        return "masked"
    if k1 - 1 <= q0:
        return "full"
    return "causal" if queries == keys else "masked"


def blocks(
    queries: Sequence[Interval],
    keys: Sequence[Interval],
    window: int | None = None,
    documents: Documents | None = None,
    tile: int = TILE,
) -> list[AttentionBlock]:
    """The attention blocks of one step.

    `queries` and `keys`: the intervals of positions in each tensor, which holds them one after the other in order of
    position.
    """
    hull_q, hull_k = (queries[0][0], queries[-1][1]), (keys[0][0], keys[-1][1])
    all_q, all_k = _length(queries), _length(keys)

    def whole(
        q: Interval, at_q: Interval, k: Interval, at_k: Interval, wanted: Relation
    ) -> AttentionBlock | None:
        found = relation(q, k, window, documents)
        return AttentionBlock(at_q, at_k, wanted, q, k) if found == wanted else None

    # Several intervals at once, where what holds for all that lies between them holds for them.
    if list(queries) == list(keys) and (one := whole(hull_q, all_q, hull_k, all_k, "causal")):
        return [one]
    if one := whole(hull_q, all_q, hull_k, all_k, "full"):
        return [one]
    made: list[AttentionBlock] = []
    left = []
    for at_k, k in _placed(keys):
        column = whole(hull_q, all_q, k, at_k, "full")
        if column is not None:
            made.append(column)
        else:
            left.append((at_k, k))
    for at_q, q in _placed(queries):
        row = whole(q, at_q, hull_k, all_k, "full") if len(left) == len(keys) else None
        if row is not None:
            made.append(row)
            continue
        for at_k, k in left:
            made += _cover(q, k, at_q[0] - q[0], at_k[0] - k[0], window, documents, tile)
    return made


def _length(intervals: Sequence[Interval]) -> Interval:
    return 0, sum(stop - start for start, stop in intervals)


def _placed(intervals: Sequence[Interval]) -> Iterator[tuple[Interval, Interval]]:
    """(where it stands in the tensor, positions) of each."""
    at = 0
    for start, stop in intervals:
        yield (at, at + stop - start), (start, stop)
        at += stop - start


def _cover(
    q: Interval,
    k: Interval,
    shift_q: int,
    shift_k: int,
    window: int | None,
    documents: Documents | None,
    tile: int,
) -> Iterator[AttentionBlock]:
    found = relation(q, k, window, documents)
    if found is None:
        return
    if found != "masked" or max(q[1] - q[0], k[1] - k[0]) <= tile:
        placed_q, placed_k = (q[0] + shift_q, q[1] + shift_q), (k[0] + shift_k, k[1] + shift_k)
        yield AttentionBlock(placed_q, placed_k, found, q, k)
        return
    for half_q in _halves(q, tile):
        for half_k in _halves(k, tile):
            yield from _cover(half_q, half_k, shift_q, shift_k, window, documents, tile)


def _halves(interval: Interval, tile: int) -> list[Interval]:
    start, stop = interval
    if stop - start <= tile:
        return [interval]
    middle = (start + stop) // 2
    return [(start, middle), (middle, stop)]


@functools.lru_cache(maxsize=64)
def steps(length: int, rings: int, window: int | None) -> tuple[int, ...]:
    """The distances t > 0 at which some ring index i sees keys of ring index i − t, the same on every rank."""

    def seen(ring: int, t: int) -> bool:
        return any(
            relation(q, k, window, None) is not None
            for q in position_chunks(length, rings, ring)
            for k in position_chunks(length, rings, (ring - t) % rings)
        )

    return tuple(t for t in range(1, rings) if any(seen(ring, t) for ring in range(rings)))
