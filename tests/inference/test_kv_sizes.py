"""The bytes of a KV cache are those of its tensors, and a block of pages is large enough for a link."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.inference import Generator
from hyper_parallel.inference.kv_cache.paged_cache import PagedCache
from hyper_parallel.inference.kv_cache.sizes import (
    BLOCK_BYTES,
    KVCacheSizes,
    LayerShape,
    block_pages,
    least_bytes,
    page_bytes,
    sizes_within,
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


@given(st.integers(1, 10**6), st.integers(1, 40), st.integers(1, 8), st.booleans(), st.integers(1, 4))
def test_sizes_fit_into_the_budget(budget: int, longest: int, batch: int, tiered: bool, heads: int) -> None:
    layers = [LayerShape((heads, 8), (heads, 8), 4), LayerShape((1, 16), (1, 4), 2)]
    room = {"host": 10**7} if tiered else {}
    wanted = longest * batch
    found = sizes_within(budget, layers, 16, longest=longest, wanted=wanted, room=room)
    least = least_bytes(layers, 16, longest=longest, tiered=tiered)
    assert (found is not None) == (budget >= least)
    if found is not None:
        assert found.device_bytes(layers, 16) <= budget
        assert found.device <= wanted
        assert (
            found.device == wanted
            or replace(found, device=found.device + 1).device_bytes(layers, 16) > budget
        )
