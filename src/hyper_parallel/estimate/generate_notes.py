"""Attention and cache of a captured pass: custom operators and notes of sizes in their place.

Transformers' attention interface gets an operator that is captured and never run; a cache notes what it is given of a
token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from hyper_parallel.errors import CaptureError
from hyper_parallel.simulator.generation.pass_model import AttentionSizes

NAME = "hyper_parallel_estimated"
"""The attention's name in Transformers."""
OPERATOR = "estimated_attention"


@torch.library.custom_op(f"hyper_parallel::{OPERATOR}", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    raise AssertionError("only captured, never run")


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return query.new_empty(1, query.size(2), query.size(1), value.size(3))


@dataclass
class Seen:
    """What attention and the cache were given, in order."""

    attended: list[tuple[int, int, int, int, int, str, int]] = field(default_factory=list)
    cached: list[tuple[int, int]] = field(default_factory=list)
    """Elements of a token of both values that each layer caches."""

    def sizes(self, rows: int) -> list[AttentionSizes]:
        """Of each attention."""
        if len(self.attended) != len(self.cached):
            raise CaptureError(
                f"{len(self.attended)} attentions and {len(self.cached)} layers that cache; a prediction of "
                "passes knows "
                "layers with one of each"
            )
        found = []
        for (heads, kv_heads, key, value, window, dtype, element), cached in zip(
            self.attended, self.cached, strict=True
        ):
            plain = (kv_heads * key, kv_heads * value)
            latent = None if cached == plain else cached
            found.append(AttentionSizes(heads, kv_heads, key, value, window, latent, element, dtype))
        return found


_current: list[Seen] = []


@contextmanager
def noting(seen: Seen) -> Iterator[None]:
    """Inside, attention notes its sizes in `seen`."""
    _current.append(seen)
    try:
        yield
    finally:
        _current.pop()


class _SeenLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer of the cache of a capture, which keeps nothing."""

    is_compileable = False
    is_sliding = False

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Note the sizes of what is cached, [1, H, T, D]."""
        self._seen.cached.append(
            (key_states.size(1) * key_states.size(3), value_states.size(1) * value_states.size(3))
        )
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As of an empty cache."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """0."""
        return 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No maximum."""
        return -1


class SeenCache(Cache):  # type: ignore[misc]
    """The cache of a capture, which keeps nothing."""

    def __init__(self, layers: int, seen: Seen) -> None:
        super().__init__(layers=[_SeenLayer(seen) for _ in range(layers)])

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """As of the layer."""
        return self.layers[0].update(key_states, value_states)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any
) -> tuple[Tensor, None]:
    window = given.get("sliding_window") or 0
    dtype = str(query.dtype).removeprefix("torch.")
    sizes = (
        query.size(1),
        key.size(1),
        query.size(3),
        value.size(3),
        int(window),
        dtype,
        query.dtype.itemsize,
    )
    _current[-1].attended.append(sizes)
    return _attend(query, key, value), None


def register() -> None:
    """Make the attention known to Transformers."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *_, **__: None)
