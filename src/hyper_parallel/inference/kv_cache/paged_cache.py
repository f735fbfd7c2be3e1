"""The paged KV cache behind Transformers' `Cache.update`: writes a pass's keys and values to the pages of its requests.

Most models hand what `update` returns to attention as it is; then attention reads the pages themselves, and `update`
returns the new rows only. A layer that computes with it first (MLA, which expands its latents) is given what `latents`
needs to absorb its matrices, and all rows of contexts that are expanded (`expand`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from hyper_parallel.errors import UnsupportedModelError
from hyper_parallel.inference.kv_cache.latents import Latents
from hyper_parallel.inference.kv_cache.pages import LayerPages
from hyper_parallel.inference.kv_cache.sizes import KVCacheSizes, LayerShape
from hyper_parallel.inference.kv_cache.staging import Staging
from hyper_parallel.inference.kv_cache.stream import StreamReader
from hyper_parallel.inference.ragged_pass import RaggedPass, Returned, Segment, current


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
        """Of each layer that has written: keys and values of no token, [1, H, 0, D]."""
        return {layer.layer: layer.pages.like for layer in self.layers if layer.pages is not None}

    def make(self, like: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Make the pages of layers whose keys and values are known."""
        for layer, (keys, values) in like.items():
            self.layers[layer].lazy_initialization(keys, values)

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """Of the layers that have written, in order."""
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
