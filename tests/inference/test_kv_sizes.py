"""The bytes of a KV cache are those of its tensors, and a block of pages is large enough for a link."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.inference import Generator
from hyper_parallel.inference.kv_cache.paged_cache import PagedCache
from hyper_parallel.inference.kv_cache.sizes import (
    BLOCK_BYTES,
    KVCacheSizes,
    KVDemand,
    LayerShape,
    block_pages,
    kv_choices,
    page_bytes,
)
from inference.small_models import prompts, small


@pytest.mark.parametrize("family", ["llama", "deepseek-v3", "gemma3"])
def test_bytes_follow_from_the_shapes_that_were_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few pages, so that some requests are scattered and the staging buffers are made."""
    seen = list[tuple[PagedCache, int, int]]()
    own = PagedCache.clear

    def noted(self: PagedCache) -> None:
        """At the end of a run."""
        seen.append((self, self.bytes, self.staging.bytes))
        own(self)

    monkeypatch.setattr(PagedCache, "clear", noted)
    model = small(family)
    generator = Generator(model, page=16, batch=6, pages=18, max_tokens=8)
    generator([prompt * 2 for prompt in prompts(model)] * 2)
    (cache, bytes_, staging_bytes), shapes = seen[-1], generator._engine.cache.shapes
    assert len(shapes) == len(cache.layers)
    staged = 2 if staging_bytes else 0
    expected = KVCacheSizes(device=18, staging=cache.sizes.staging).device_bytes(shapes, 16)
    rows = sum(max(one.planes[which] for one in shapes) for which in range(2))
    assert bytes_ == expected - (2 - staged / 2) * cache.sizes.staging * rows
    assert cache.bytes == 0


def test_a_block_is_large_enough() -> None:
    for count in (1, 1000, BLOCK_BYTES - 1, BLOCK_BYTES, 4 << 20):
        assert count * block_pages(count) >= BLOCK_BYTES
        assert block_pages(count) == 1 or count * (block_pages(count) - 1) < BLOCK_BYTES
    assert page_bytes([], 16) == 0


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.integers(1, 8),
    st.sampled_from([{}, {"host": 10**5}, {"host": 10**6, "flash": 10**7}]),
    st.integers(1, 4),
)
def test_choices_hold_the_requests(pages: list[int], count: int, room: dict[str, int], heads: int) -> None:
    layers = (LayerShape((heads, 8), (heads, 8), 4), LayerShape((1, 16), (1, 4), 2))
    pages.sort(reverse=True)
    count = min(count, len(pages))
    demand = KVDemand(shapes=layers, page=16, pages=tuple(pages), room=room)
    choices = list(kv_choices(demand, count))
    assert choices[0].sizes.device == sum(pages[:count])
    assert not choices[0].tiered
    for choice in choices:
        sizes = choice.sizes
        assert all(getattr(sizes, name) * demand.bytes <= bytes_ for name, bytes_ in room.items())
        assert (choice.read > 0) == (sizes.device < pages[0])
        if choice.read:
            assert sizes.group is not None
            assert sizes.group < sizes.device
            assert sizes.tiered
