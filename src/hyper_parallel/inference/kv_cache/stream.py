"""Streamed contexts: keys and values of a request that lie in tiers are read layer by layer into staging buffers.

The older pages of a long request lie in groups: a block for the keys and one for the values of each layer, so that a
layer reads its own alone. While attention computes on one staging buffer, the next layer's (or the next request's)
blocks are read into the other: the order of the pass before says which they are. Attention is given the whole context
in one piece, as if it lay on the device, and so has the same bits.

Groups before a sliding window are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hyper_parallel.inference.kv_cache.pages import LayerPages
from hyper_parallel.inference.kv_cache.staging import Staging
from hyper_parallel.inference.kv_cache.tiers import Block, KVTiers
from hyper_parallel.offloading.tiers import Pending

if TYPE_CHECKING:
    from hyper_parallel.inference.ragged_pass import RaggedPass, Segment


@dataclass(eq=False, slots=True)
class Group:
    """Tokens `first` to `end - 1` of a request: blocks by layer, for keys (0) and values (1)."""

    first: int
    end: int
    blocks: dict[tuple[int, int], Block] = field(default_factory=dict)


@dataclass(eq=False)
class _Fetch:
    """One layer of one segment on its way into a staging buffer, from token `low` on."""

    layer: int
    segment: Segment
    low: int
    side: int
    views: tuple[Tensor, Tensor]
    pending: list[Pending]


class StreamReader:
    """Reads contexts of the pass under way. Not for several threads."""

    def __init__(self, staging: Staging, tiers: KVTiers, layers: Sequence[LayerPages | None]) -> None:
        """`layers`: the pages of each."""
        self._staging, self._tiers, self._layers = staging, tiers, list(layers)
        self._next: _Fetch | None = None
        self._order: list[int] = []
        self._seen: list[int] = []
        self._first: dict[int, int] = {}
        """Of each layer: the first token that was last read, from the segment's end; none where it was token 0."""
        self._segments: list[Segment] = []
        self.stalled = 0.0
        """Seconds in which the calling thread was held up by reads."""

    def begin(self, ragged: RaggedPass) -> None:
        """A pass begins: read the first layer of its first streamed segment."""
        self._drop()
        self._segments = [one for one in ragged.segments if one.older]
        self._order, self._seen = self._seen or self._order, []
        if self._segments and self._order:
            self._prefetch(self._order[0], self._segments[0])

    def read(self, layer: int, segment: Segment, first: int, rows: Sequence[slice]) -> tuple[Tensor, Tensor]:
        """Keys and values [1, H, end - first, D] of a segment from token `first`, which is in a tier, on. `rows`: those
        on the device. Raises TierError."""
        found, self._next = self._next, None
        if found is None or (found.layer, found.segment) != (layer, segment) or found.low > first:
            self._settle(found)
            found = self._fetch(layer, segment, first)
        self._settle(found)
        pages = self._layers[layer]
        assert pages is not None
        for store, view in zip(pages.stores, found.views, strict=True):
            torch.cat([store[one] for one in rows], out=view[segment.base - found.low :])
        self._staging.side = found.side
        if not self._seen or self._seen[-1] != layer:
            self._seen.append(layer)
        self._first.pop(layer, None)
        if first:
            self._first[layer] = first - segment.end
        self._ahead(layer, segment)
        keys, values = (view[first - found.low :].transpose(0, 1).unsqueeze(0) for view in found.views)
        return keys, values

    def clear(self) -> None:
        """Give up what is being read."""
        self._next, self._segments, self._layers = None, [], []

    def _ahead(self, layer: int, segment: Segment) -> None:
        """Begin to read what comes next."""
        place = self._segments.index(segment) + 1
        if place < len(self._segments):
            self._prefetch(layer, self._segments[place])
            return
        step = len(self._seen)
        if step < len(self._order) and self._order[step - 1] == layer:
            self._prefetch(self._order[step], self._segments[0])

    def _prefetch(self, layer: int, segment: Segment) -> None:
        first = max(segment.end + self._first.get(layer, -segment.end), 0)
        if first < segment.base and self._layers[layer] is not None:
            self._next = self._fetch(layer, segment, first)

    def _fetch(self, layer: int, segment: Segment, first: int) -> _Fetch:
        groups = [group for group in segment.older if group.end > first]
        low, side = groups[0].first, 1 - self._staging.side
        pages = self._layers[layer]
        assert pages is not None
        keys, values = (
            self._staging.view(which, store, segment.end - low, side)
            for which, store in enumerate(pages.stores)
        )
        pending = []
        for which, view in enumerate((keys, values)):
            for group in groups:
                block = group.blocks[layer, which]
                part = view[group.first - low : group.end - low].view(-1).view(torch.uint8)
                pending.append(self._tiers.begin_read(block, part))
        return _Fetch(layer, segment, low, side, (keys, values), pending)

    def _settle(self, found: _Fetch | None) -> None:
        if found is not None:
            self.stalled += sum(one.wait() for one in found.pending)
            found.pending = []

    def _drop(self) -> None:
        self._settle(self._next)
        self._next = None
