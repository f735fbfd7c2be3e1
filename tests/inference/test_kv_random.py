"""Random mixes of requests in random, tiny memories: the same tokens as with all on the device, and nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from hyper_parallel.inference import Generator, Request
from hyper_parallel.inference.kv_cache.kv_memory import KVMemory
from hyper_parallel.inference.kv_cache.sizes import KVCacheSizes
from inference.opened_tiers import opened
from inference.small_models import small

FAMILIES = ["llama", "gemma3", "gpt-oss", "deepseek-v3", "mixtral"]
CASES = 18


def mixed(draws: random.Random, generator: Generator) -> list[Request]:
    """Requests of which some have a common beginning."""
    beginnings = [[draws.randrange(100) for _ in range(draws.choice((0, 20, 50)))] for _ in range(3)]
    requests = []
    for _ in range(draws.randint(3, 6)):
        ids = draws.choice(beginnings) + [draws.randrange(100) for _ in range(draws.randint(1, 60))]
        settings = generator.settings.model_copy(
            update={"max_tokens": draws.choice((1, 5, 25)), "temperature": draws.choice((0.0, 1.0))}
        )
        requests += [generator.request(ids, settings, sample) for sample in range(draws.choice((1, 1, 3)))]
    return requests


def check_nothing_is_lost(memory: KVMemory, device: int) -> None:
    """After a run, every page and slot is free, or holds a prefix."""
    assert memory._pool.available == device
    assert not memory._arriving
    tiers = memory.tiers
    for level, count, idle in zip(tiers.levels, tiers.counts, tiers.idle, strict=True):
        assert sorted([*level.free[tiers.slot], *(block.slot for block in idle)]) == list(range(count))
        assert all(block.keys and not block.pins for block in idle)


def test_random_mixes(tmp_path: Path) -> None:
    draws = random.Random("mixes")
    generators = [Generator(small(family), page=16, logprobs=True) for family in FAMILIES]
    generators.append(Generator(small("llama"), page=16, logprobs=True, kv_dtype="int8"))
    happened = dict.fromkeys(("shared", "fetched", "swapped", "recomputed", "streamed"), 0)
    for case in range(CASES):
        generator = generators[case % len(generators)]
        cache, requests = generator._engine.cache, mixed(draws, generator)
        settings = generator.settings.model_copy(update={"batch": draws.randint(1, 6)})
        # On the device, and no page shared.
        alone = settings.model_copy(update={"prefix_cache": False})
        expected = dict(generator.run(requests, alone))
        device, block = draws.randint(3, 9), draws.choice((1, 1, 2, 3))
        names: Sequence[str] = draws.choice(
            (("host",), ("flash",), ("host", "flash"), ("host", "pool", "flash"))
        )
        pages = {name: draws.choice((8, 90)) for name in names}
        longest = max(one.pages(16) for one in requests)
        if longest > device:
            pages[names[-1]] = 40 * longest * block
        cache.configure(KVCacheSizes(device=device, block=block, **pages), opened(tuple(names), tmp_path))
        for _ in range(2):
            found = dict(generator.run(requests, settings))
            for place, answer in expected.items():
                assert found[place].tokens == answer.tokens
                assert found[place].logprobs == answer.logprobs
            assert cache._open is not None
            check_nothing_is_lost(cache._open[2], device)
            for name in happened:
                happened[name] += getattr(cache.report, name)
        cache.close()
        cache._budget = None
    assert all(happened.values()), happened
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
