"""The paged KV cache behind Transformers' `Cache.update`: writes a pass's keys and values to the pages of its requests.

Most models hand what `update` returns to attention as it is; then attention reads the pages themselves, and `update`
returns the new rows only. A layer that computes with it first (MLA, which expands its latents) is given what `latents`
needs to absorb its matrices, and all rows of contexts that are expanded (`expand`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from hyper_parallel.errors import UnsupportedModelError
from hyper_parallel.inference.kv_cache.pages import LayerPages, Staging, StreamReader
from hyper_parallel.inference.kv_cache.sizes import KVCacheSizes, LayerShape
from hyper_parallel.inference.ragged_pass import BLOCK, RaggedPass, Returned, Segment, current, pass_rows


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `PagedCache`."""

    is_compileable = False
    is_sliding = False

    def __init__(
        self, layer: int, pages: int, page: int, staging: Staging, unpacked: Staging | None, latents: Latents
    ) -> None:
        """`staging`, `unpacked`: buffers as `LayerPages` has them."""
        super().__init__()
        self.layer = layer
        self.expand = False
        """Whether the layer computes with what `update` returns, before attention."""
        self.latents = latents
        self.pages: LayerPages | None = None
        self.stream: StreamReader | None = None
        self._sizes = (pages, page, staging)
        self._unpacked = unpacked

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the pages, for keys and values like these."""
        self.pages = LayerPages(*self._sizes, key_states, value_states, self._unpacked)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write [1, H, T, D]; the rows that were given, or with `expand` what `latents` gives."""
        if self.pages is None:
            self.lazy_initialization(key_states, value_states)
        assert self.pages is not None
        ragged = current()
        self.pages.write(ragged.slots, key_states, value_states)
        ragged.last = self
        if not self.expand:
            versions = (key_states._version, value_states._version)
            ragged.returned[key_states.data_ptr()] = Returned(self, key_states, value_states, versions)
            return key_states, value_states
        return self.latents.given(key_states, value_states, ragged.segments, self.read)

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all pages on the device, as they are stored: [1, H, rows, ...]."""
        assert self.pages is not None
        return self.pages.rows

    def unpacked(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [1, H, S, D] of stored ones. The next call of any layer may overwrite them."""
        assert self.pages is not None
        return self.pages.unpacked(keys, values)

    def read(self, segment: Segment, first: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values [1, H, end - first, D] of a segment's context from token `first` on, in the pass under way.
        The next call of any layer may overwrite them."""
        assert self.pages is not None
        rows = current().cached_rows(segment, max(first, segment.base))
        if first < segment.base:
            assert self.stream is not None, "keys before the pages on the device"
            return self.pages.unpacked(*self.stream.read(self.layer, segment, first, rows))
        return self.pages.unpacked(*self.pages.read(rows))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Not used: masks are functions of positions (`paged_attention`)."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """0: positions are given with each pass."""
        return 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No maximum (name of earlier versions)."""
        return -1


class PagedCache(Cache):  # type: ignore[misc]
    """Pages of all layers."""

    def __init__(
        self,
        layers: int,
        sizes: KVCacheSizes,
        page: int,
        *,
        int8: bool = False,
        absorb: bool = True,
        keep: bool = False,
    ) -> None:
        """`int8`: pages of rounded values (`int8_rows`), else in the dtype of the model. `absorb`, `keep`: as `Latents`
        has them."""
        self.sizes = sizes
        self.staging = Staging(sizes.staging)
        self._unpacked = Staging(sizes.staging) if int8 else None
        """Of the context that attention reads; a part of the workspace of a pass."""
        self._reader: StreamReader | None = None
        self._poll: Callable[[], None] | None = None
        super().__init__(
            layers=[
                PagedLayer(
                    layer,
                    sizes.device + sizes.pinned,
                    page,
                    self.staging,
                    self._unpacked,
                    Latents(absorb=absorb, keep=keep),
                )
                for layer in range(layers)
            ]
        )

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """As Transformers'. Raises UnsupportedModelError for a layer of another index than the model's layers have."""
        if layer_idx >= len(self.layers):
            raise UnsupportedModelError(
                f"the model caches keys of layer {layer_idx}, and its config has {len(self.layers)} layers"
            )
        if self._poll is not None:
            self._poll()
        return self.layers[layer_idx].update(key_states, value_states)

    def attach(self, reader: StreamReader, poll: Callable[[], None]) -> None:
        """Read contexts in tiers with `reader`, and call `poll` in every layer."""
        self._reader, self._poll = reader, poll
        for layer in self.layers:
            layer.stream = reader

    def clear(self) -> None:
        """Give up all pages and buffers."""
        self.staging.clear()
        if self._unpacked is not None:
            self._unpacked.clear()
        for layer in self.layers:
            layer.pages = None

    def copy_page(self, page: int, target: int) -> None:
        """Copy a page to another one, in all layers."""
        for layer in self.layers:
            if layer.pages is not None:
                layer.pages.copy(page, target)

    def prepare(self, longest: int) -> None:
        """Contexts of up to `longest` tokens come: buffers that are made are large enough for these."""
        self.staging.rows = longest
        if self._unpacked is not None:
            self._unpacked.rows = longest

    def begin(self, ragged: RaggedPass) -> None:
        """A pass begins."""
        if self._reader is not None:
            self._reader.begin(ragged)

    def like(self) -> dict[int, tuple[Tensor, Tensor]]:
        """For each layer that has written: keys and values of no token, [1, H, 0, D]."""
        return {layer.layer: layer.pages.like for layer in self.layers if layer.pages is not None}

    def make(self, like: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Make the pages of layers whose keys and values are known."""
        for layer, (keys, values) in like.items():
            self.layers[layer].lazy_initialization(keys, values)

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """Shapes of the layers that have written, in order."""
        return tuple(layer.pages.shape for layer in self.layers if layer.pages is not None)

    @property
    def stores(self) -> list[Tensor]:
        """The pages that were made, of all layers."""
        return [store for layer in self.layers if layer.pages is not None for store in layer.pages.stores]

    @property
    def bytes(self) -> int:
        """On the device: of all pages and staging buffers that were made, without the values of int8 pages that a pass
        reads."""
        return self.staging.bytes + sum(store.nbytes for store in self.stores)


# Cached values that a layer computes with before attention: latents, which MLA expands to keys and values of heads.
#
# Where a layer is linear in them, token by token, the matrices are found by giving it unit vectors in place of cached
# rows: what it makes of them are matrices A of keys and B of values. Attention to expanded latents L is then
# softmax((q A^T) L^T) L B (DeepSeek-V2, section 2.1.2), and contexts need not be expanded. Other layers, and the
# segments of a pass with many rows, for which expanding takes less, are given all rows of their contexts.

ABSORBED_ROWS = 64
"""Rows of a segment up to which matrices are absorbed. A context of S tokens takes S · R · (Dk + Dv) products a head to
expand, and a row of queries about 2 · S · R more in latents: R = 512, Dk = 192 and Dv = 128 break even at 160 rows of
DeepSeek-V3."""
_NEARLY = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Rounding of a product, by dtype; 3e-2 for narrower ones."""

Read = Callable[[Segment], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Matrices:
    """Matrices that a layer multiplies cached values by: the first R1 rows belong to the first one, the others to the
    second."""

    keys: Tensor
    """[H, R1 + R2, Dk]."""
    values: Tensor
    """[H, R1 + R2, Dv]."""
    first: int
    """R1."""
    one_in_values: bool
    """Whether values depend on the first one only."""


class Latents:
    """Latents of one layer. A pass calls `given`, the layer computes, then attention calls `learn` and `whole`."""

    def __init__(self, *, absorb: bool, keep: bool) -> None:
        """`keep`: matrices are found once, and not in every pass: for weights that stay the same."""
        self.linear: bool | None = None if absorb else False
        """Whether the layer is linear in what it cached; None until that was tried."""
        self._keep = keep
        self._kept: Matrices | None = None
        self._one_in_values: bool | None = None
        self._units: tuple[Tensor, Tensor] | None = None
        self._whole: dict[int, slice] = {}
        self._rows = 0

    def given(
        self, first: Tensor, second: Tensor, segments: Sequence[Segment], read: Read
    ) -> tuple[Tensor, Tensor]:
        """The values that the layer computes with, [1, H, rows, R1] and [1, H, rows, R2]: unit vectors where matrices
        are to be found, then all rows of contexts that are expanded. `first` and `second`: the rows of the pass
        itself."""
        if first.size(1) != 1 or second.size(1) != 1:
            self.linear = False
        self._units = None
        if self.linear is not False and self._kept is None:
            self._units = _unit_vectors(first, second)
        whole = [one for one in segments if self.linear is False or one.count > ABSORBED_ROWS]
        end = 0 if self._units is None else self._units[0].size(2)
        # Never without rows, which some models' views do not take.
        self._rows = pass_rows(end + sum(one.end for one in whole), BLOCK)
        given = tuple(x.new_zeros(1, x.size(1), self._rows, x.size(3)) for x in (first, second))
        if self._units is not None:
            for all_, part in zip(given, self._units, strict=True):
                all_[:, :, :end] = part
        self._whole = {}
        for segment in whole:
            # One after the other: what is read may lie in staging buffers.
            for all_, context in zip(given, read(segment), strict=True):
                all_[:, :, end : end + segment.end] = context
            self._whole[segment.start] = slice(end, end + segment.end)
            end += segment.end
        return given[0], given[1]

    def learn(self, keys: Tensor, values: Tensor) -> Matrices | None:
        """The matrices, from what the layer made of `given`: [1, H, rows, Dk] and [1, H, rows, Dv]. None for a layer
        that is not linear, and needs all contexts."""
        if self._kept is not None or self._units is None:
            return self._kept
        (first, second), self._units = (x[0, 0] for x in self._units), None
        count = first.size(1) + second.size(1)
        found = [x[0, :, :count].contiguous() for x in (keys, values)]
        if self.linear is None:
            row = torch.cat([first[-1], second[-1]])
            results = (x[0, :, count] for x in (keys, values))
            self.linear = all(_is_product(row, matrix, x) for matrix, x in zip(found, results, strict=True))
        if not self.linear:
            return None
        if self._one_in_values is None:
            self._one_in_values = not bool(found[1][:, first.size(1) :].any())
        matrices = Matrices(found[0], found[1], first.size(1), self._one_in_values)
        self._kept = matrices if self._keep else None
        return matrices

    @property
    def rows(self) -> int:
        """Rows of what was given."""
        return self._rows

    def whole(self, segment: Segment) -> slice | None:
        """A segment's context among the rows that were given; None where matrices are absorbed."""
        return self._whole.get(segment.start)


def _unit_vectors(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """[1, 1, R1 + R2 + 1, R1] and [1, 1, R1 + R2 + 1, R2]: unit vectors of both together, and a random vector."""
    sizes = first.size(3), second.size(3)
    count = sum(sizes)
    drawn = torch.randn(1, count, generator=torch.Generator().manual_seed(0))
    rows = torch.cat([torch.eye(count), drawn]).to(first.device, first.dtype)
    one, other = rows.split(sizes, 1)
    return one[None, None], other[None, None]


def _is_product(row: Tensor, matrices: Tensor, found: Tensor) -> bool:
    """Whether found [H, D] is row [R] @ matrices [H, R, D], but for rounding."""
    expected = row.float() @ matrices.float()
    bound = row.float().abs() @ matrices.float().abs()
    far = (found.float() - expected).abs() - _NEARLY.get(found.dtype, 3e-2) * bound
    return bool((far <= 0).all())
