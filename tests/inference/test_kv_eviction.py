"""A full tier gives up what was used least recently: of a prompt the last page, of two prompts the older one."""

from __future__ import annotations

from pathlib import Path

from hyper_parallel.inference import Generator
from hyper_parallel.inference.kv_cache.page_pool import filled_keys
from hyper_parallel.inference.kv_cache.sizes import KVCacheSizes
from hyper_parallel.inference.kv_cache.tiers import Block, KVTiers
from inference.opened_tiers import opened
from inference.small_models import small

PAGE = 16


def _block(tiers: KVTiers, key: bytes) -> Block:
    """An idle block of a prompt's page."""
    block = tiers.place(8)
    assert block is not None
    block.keys.append(key)
    tiers.unpin(block)
    return block


def test_the_least_recently_used_block_moves_down_and_is_dropped_at_last(tmp_path: Path) -> None:
    tiers = KVTiers(opened(("host", "flash"), tmp_path)(), KVCacheSizes(device=3, host=2, flash=1), 8)
    dropped: list[bytes] = []
    tiers.dropped = lambda block: dropped.extend(block.keys)

    def move(block: Block, level: int) -> None:
        block.level, block.slot = level, tiers.levels[level].take(tiers.slot)

    tiers.move = move
    first, second = _block(tiers, b"first"), _block(tiers, b"second")
    tiers.touch(first)
    third = _block(tiers, b"third")
    assert (first.level, second.level, third.level) == (0, 1, 0)
    _block(tiers, b"fourth")
    assert (first.level, third.level) == (1, 0) and dropped == [b"second"]
    # What a request needs stays.
    tiers.pin(third)
    _block(tiers, b"fifth")
    assert third.level == 0 and dropped == [b"second", b"first"]
    tiers.close()


def test_of_a_prompt_the_beginning_stays_longest(tmp_path: Path) -> None:
    generator = Generator(small("llama"), page=PAGE, max_tokens=4)
    cache = generator._engine.cache
    cache.configure(KVCacheSizes(device=9, host=3, block=1), opened(("host",), tmp_path))
    prompt = [7 + place % 50 for place in range(6 * PAGE + 4)]
    generator([prompt])
    # It needs the memory of all pages of the prompt, of which three have a place on the host.
    generator([[3] * (8 * PAGE)])
    assert cache._open is not None
    memory = cache._open[2]
    assert [memory.holds(key) for key in filled_keys(prompt, PAGE)] == [True] * 3 + [False] * 3
    generator.close()
