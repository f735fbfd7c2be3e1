"""The budget of a TieredCache holds whatever is done to it, as an observer of live storages sees it; its contents are
those of DynamicCache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, Gemma3TextConfig

from harness.observer import Observer
from hyper_parallel import TieredCache
from hyper_parallel.inference.tiered_cache.split import (
    LayerSize,
    block_tokens,
    smallest_budget,
    spill_order,
    split,
)
from hyper_parallel.offloading.tiers.memory_tier import MemoryTier

WINDOW = 24


class _OfCache(Observer):
    """Sees all but the given tensors and the tier's own memory."""

    def __init__(self, tier: list[MemoryTier]) -> None:
        self.tier = tier
        self.apart: list[Tensor] = []
        super().__init__([])

    @property
    def alive(self) -> int:
        apart = {x.untyped_storage().data_ptr() for x in self.apart}
        apart |= {one._memory.untyped_storage().data_ptr() for one in self.tier}
        there = [reference() for reference in list(self._known.values())]
        return sum(one.nbytes() for one in there if one is not None and one.data_ptr() not in apart)


def _config(layers: int, sliding: Sequence[bool]) -> Any:
    types = ["sliding_attention" if sliding[layer] else "full_attention" for layer in range(layers)]
    return Gemma3TextConfig(num_hidden_layers=layers, sliding_window=WINDOW, layer_types=types)


def _reset_empties() -> bool:
    """Whether Transformers' own cache is empty after `reset`; in 5.17 it keeps its length, of zeros."""
    own = DynamicCache()
    own.update(torch.ones(1, 1, 2, 1), torch.ones(1, 1, 2, 1), 0)
    own.reset()
    return own.get_seq_length() == 0


Operation = tuple[str, int]
CHANGES = ["reorder", "select", "repeat", "crop", *(["reset"] if _reset_empties() else [])]
OPERATIONS = st.one_of(
    st.tuples(st.just("update"), st.sampled_from([1, 1, 1, 2, 7, 40])),
    st.tuples(st.sampled_from(CHANGES), st.integers(0, 5)),
)


@settings(max_examples=40)
@given(
    st.integers(1, 6),
    st.lists(st.booleans(), min_size=6, max_size=6),
    st.sampled_from([(2, 8, 8), (1, 16, 4), (1, 5, 3)]),
    st.floats(0.0, 1.0),
    st.lists(OPERATIONS, min_size=1, max_size=30),
)
@example(2, [False] * 6, (2, 8, 8), 0.0, [*[("update", 7)] * 3, ("select", 0), ("update", 1)])
@example(6, [True] * 6, (2, 8, 8), 0.0, [("update", 40), ("update", 1), ("reorder", 3)] * 6)
@example(4, [False] * 6, (2, 8, 8), 0.3, [("update", 40), ("repeat", 2), ("update", 1), ("crop", 5)] * 3)
@example(4, [False] * 6, (1, 16, 4), 0.1, [("update", 40), *[("update", 1), ("reorder", 1)] * 10])
def test_whatever_is_done(
    layers: int, sliding: list[bool], shape: tuple[int, int, int], part: float, operations: list[Operation]
) -> None:
    config = _config(layers, sliding)
    budget = _needed(layers, sliding, shape, operations, part)
    draws = torch.Generator().manual_seed(0)
    own, cache = DynamicCache(config=config), TieredCache(config, device=budget, host="64MiB")
    heads, keys, values = shape
    tiers: list[MemoryTier] = []
    reserve = MemoryTier.reserve

    def reserved(self: MemoryTier, *args: Any) -> None:
        if self not in tiers:
            tiers.append(self)
        reserve(self, *args)

    rows = 2
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(MemoryTier, "reserve", reserved)
        observer = _OfCache(tiers)
        for name, number in operations:
            length = own.get_seq_length()
            if name == "update":
                for layer in range(layers):
                    given_keys = torch.rand(rows, number, heads, keys, generator=draws).transpose(1, 2)
                    given_values = torch.rand(rows, number, heads, values, generator=draws).transpose(1, 2)
                    expected = own.update(given_keys, given_values, layer)
                    sizes = own.get_mask_sizes(number, layer), own.get_seq_length(layer)
                    observer.apart = [given_keys, given_values]
                    with observer:
                        found = cache.update(given_keys, given_values, layer)
                    assert all(map(torch.equal, found, expected))
                    assert all(x.is_contiguous() for x in found)
                    assert sizes == (cache.get_mask_sizes(number, layer), cache.get_seq_length(layer))
                    observer.apart.clear()
                    del found, expected, given_keys, given_values
                continue
            rows = _change(name, number, own, cache, observer, rows, length)
        assert observer.peak <= budget
        assert cache.report.device <= budget
    cache.close()


def _change(
    name: str, number: int, own: DynamicCache, cache: TieredCache, observer: _OfCache, rows: int, length: int
) -> int:
    """Rows afterwards."""
    if name == "reorder" and length:
        order = torch.tensor([*((row + number) % rows for row in range(rows - 1)), 0])
        own.reorder_cache(order)
        observer.apart.append(order)
        with observer:
            cache.reorder_cache(order)
    elif name == "select" and length:
        order = torch.tensor(sorted({number % rows, 0}))
        own.batch_select_indices(order)
        cache.batch_select_indices(order)
        return order.numel()
    elif name == "repeat" and length and rows * number in range(1, 5):
        own.batch_repeat_interleave(number)
        with observer:
            cache.batch_repeat_interleave(number)
        return rows * number
    elif name == "crop" and length and (length < WINDOW or not any(own.is_sliding)):
        own.crop(-number)
        cache.crop(-number)
    elif name == "reset":
        own.reset()
        cache.reset()
        return 2
    return rows


def _needed(
    layers: int, sliding: list[bool], shape: tuple[int, int, int], operations: list[Operation], part: float
) -> int:
    """A budget between the smallest that works and one where all fits."""
    heads, keys, values = shape
    rows, length, low, high = 2, 0, 0, 0
    for name, number in operations:
        new = number if name == "update" else 0
        if name == "repeat" and length and rows * number in range(1, 5):
            rows *= number
        token = rows * heads * (keys + values) * 4
        sizes = [LayerSize(token, WINDOW - 1 if one else None) for one in sliding[:layers]]
        length += new
        if length:
            low = max(low, smallest_budget(sizes, length, new))
            high = max(high, (layers + 1) * length * token)
        if name == "select" and length:
            rows = len({number % rows, 0})
        elif name == "crop" and length and (length < WINDOW or not any(sliding[:layers])):
            length = max(0, length - number)
        elif name == "reset":
            rows, length = 2, 0
    return max(1, int(low + part * max(0, high - low)))


SIZES = st.builds(LayerSize, st.integers(1, 1000), st.one_of(st.none(), st.integers(1, 300)), st.booleans())


@given(st.lists(SIZES, min_size=1, max_size=12), st.integers(1, 2000), st.floats(0.0, 1.0))
def test_the_smallest_budget(sizes: list[LayerSize], tokens: int, share: float) -> None:
    """It suffices, and so does any larger one; one byte less does not."""
    new = max(1, int(share * tokens))
    floor = smallest_budget(sizes, tokens, new)

    def found(budget: int) -> Any:
        return split(sizes, tokens, new, budget, block_tokens(sizes, budget), frozenset())

    for budget in (floor, floor + 1, floor * 9 // 8, 2 * floor, 100 * floor):
        chosen = found(budget)
        assert chosen is not None
        assert chosen.window >= 0
    if tokens >= 64 and all(not one.pinned and one.before is None for one in sizes):
        assert found(floor - 1) is None
    assert sorted(spill_order(sizes)) == [at for at, one in enumerate(sizes) if not one.pinned]


def test_layers_are_spread() -> None:
    order = spill_order([LayerSize(1)] * 8)
    assert [sorted(order[:count]) for count in (1, 2, 4)] == [[0], [0, 4], [0, 2, 4, 6]]


def test_blocks_are_transfers_of_half_a_mebibyte() -> None:
    sizes = [LayerSize(4096)] * 32
    assert block_tokens(sizes, 2**31) * 4096 == 2**19
    assert block_tokens(sizes, 2**20) == 16


def test_layers_that_become_streamed_stay_so() -> None:
    sizes = [LayerSize(100)] * 8
    some = split(sizes, 100, 1, 75_000, 16, frozenset())
    assert some is not None
    assert 0 < len(some.streamed) < 8
    more = split(sizes, 120, 1, 75_000, 16, some.streamed)
    assert more is not None
    assert some.streamed < more.streamed


def test_a_cache_that_is_reset_holds_nothing() -> None:
    """Neither layers nor buffers that were kept for blocks to come."""
    cache = TieredCache(_config(4, [False] * 4), device=40_000, host=2**20)
    x = torch.randn(1, 2, 64, 8)
    for _ in range(4):
        for layer in range(4):
            cache.update(x[:, :, :16], x[:, :, :16], layer)
    streamed = next(layer for layer in cache.layers if layer.streamed)
    cache._transfers.cancel()
    cache._transfers.read(streamed.needed(), x.device, lambda *_: None)
    assert cache._transfers._idle
    cache.reset()
    assert cache._transfers.held == 0
    assert not cache._transfers._idle
