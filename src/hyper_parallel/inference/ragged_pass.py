"""A pass through the model: one row [1, T] of tokens of many requests, and where their keys and values lie.

Each request has a segment of the row. Linear layers see T tokens; attention runs segment by segment
(`paged_attention`). The end of the row is filled up to a multiple of a few rows. On the host products are computed in
blocks of `BLOCK` rows, and so add up in one order whatever else is in the pass (`blocked_products`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hyper_parallel.inference.kv_cache.tiers import Group
from hyper_parallel.inference.run_allocator import Run, rows_of
from hyper_parallel.units import round_up

if TYPE_CHECKING:
    from transformers.cache_utils import CacheLayerMixin

BLOCK = 16
"""Rows of a matrix product on the host; a pass has at least as many."""
GRANULE = 8
"""Rows of a pass on the host are a multiple of this many tokens."""
WIDE = 32
"""The same where rows are split over ranks, and on accelerators, whose kernels are chosen for each number of rows."""


@dataclass(frozen=True)
class Segment:
    """Tokens of one request in a pass: rows `start` to `start + count - 1`, at positions `first` onwards."""

    start: int
    count: int
    first: int
    runs: tuple[Run, ...]
    """Its pages on the device, from token `base` on."""
    base: int = 0
    """Tokens before these pages: in a tier (`older`), or of no use any more."""
    older: tuple[Group, ...] = ()

    @property
    def rows(self) -> slice:
        """Its part of the row."""
        return slice(self.start, self.start + self.count)

    @property
    def end(self) -> int:
        """Tokens of the request that are cached after the pass."""
        return self.first + self.count


@dataclass(frozen=True)
class Returned:
    """Keys and values that the cache returned to a layer as they were given."""

    layer: CacheLayerMixin
    keys: Tensor
    values: Tensor
    versions: tuple[int, int]

    def same(self, keys: Tensor, values: Tensor) -> bool:
        """Whether attention is given them unchanged."""
        return all(
            x.data_ptr() == own.data_ptr()
            and x.shape == own.shape
            and x.stride() == own.stride()
            and own._version == version
            for x, own, version in zip((keys, values), (self.keys, self.values), self.versions, strict=True)
        )


@dataclass(eq=False)
class RaggedPass:
    """The pass under way, as attention and the cache see it."""

    segments: Sequence[Segment]
    page: int
    """Tokens of a page."""
    slots: Tensor
    """Row of the KV cache of each token, int64 [tokens without the filling]."""
    returned: dict[int, Returned] = field(default_factory=dict)
    """By the keys' address. Tensors are kept, so that no other of the pass has it."""
    length: int = 0
    """Rows, the filling included."""
    last: CacheLayerMixin | None = None
    """The layer that last wrote to the cache."""
    _rows: dict[tuple[int, int], list[slice]] = field(default_factory=dict)
    _token: Token[RaggedPass | None] | None = None

    def cached_rows(self, segment: Segment, first: int = 0) -> list[slice]:
        """Rows of the KV cache with the context of a segment, from token `first` on."""
        key = (segment.start, first)
        if key not in self._rows:
            base = segment.base
            assert first >= base, "keys before the pages on the device"
            self._rows[key] = rows_of(segment.runs, self.page, first - base, segment.end - base)
        return self._rows[key]

    def __enter__(self) -> RaggedPass:
        self._token = _CURRENT.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _CURRENT.reset(self._token)
        self.returned.clear()


def current() -> RaggedPass:
    """The pass under way in this thread."""
    found = _CURRENT.get()
    assert found is not None, "no pass is under way"
    return found


def pass_rows(tokens: int, granule: int) -> int:
    """The length of the row for this number of tokens."""
    return max(BLOCK, round_up(tokens, granule))


def positions_of(segments: Sequence[Segment], length: int, device: torch.device) -> Tensor:
    """Positions of a row of `length` tokens, int64 [1, length]; 0 in the filling."""
    positions = [0] * length
    for segment in segments:
        positions[segment.rows] = range(segment.first, segment.end)
    return torch.tensor([positions], device=device)


_CURRENT: ContextVar[RaggedPass | None] = ContextVar("ragged_pass", default=None)
