"""With few pages on the device and more in tiers, tokens have the bits that they have with all on the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyper_parallel.inference import Generator
from hyper_parallel.inference.kv_cache.sizes import KVCacheSizes
from inference.small_models import prompts, small
from inference.tiers import opened


@pytest.mark.parametrize(
    ("family", "happened", "lengths", "device", "pages"),
    [
        ("llama", "swapped", (1, 31, 32, 33, 70), 9, {"host": 60}),
        ("gemma3", "swapped", (1, 31, 32, 33, 70), 9, {"host": 60}),
        ("gemma3", "streamed", (140, 12, 132, 160), 8, {"flash": 200}),
        ("deepseek-v3", "streamed", (140, 12, 132, 160), 8, {"flash": 200}),
        ("gpt-oss", "streamed", (140, 12, 132, 160), 8, {"host": 200}),
    ],
)
def test_bits_are_those_of_a_cache_on_the_device(
    family: str, happened: str, lengths: tuple[int, ...], device: int, pages: dict[str, int], tmp_path: Path
) -> None:
    model = small(family)
    given = prompts(model, lengths)
    generator = Generator(model, page=16, max_tokens=20, logprobs=True)
    plain = generator(given)
    cache = generator._engine.cache
    cache.configure(KVCacheSizes(device=device, **pages), opened(tuple(pages), tmp_path))
    for one, other in zip(plain, generator(given), strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == other.logprobs
    assert getattr(cache.report, happened)
    assert not cache.report.recomputed
    assert not cache.report.unused
