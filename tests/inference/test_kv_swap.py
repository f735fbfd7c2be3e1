"""With few pages on the device and more in tiers, tokens have the bits that they have with all on the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyper_parallel.inference import Generator
from hyper_parallel.inference.kv_cache import kv_memory
from hyper_parallel.inference.kv_cache.sizes import KVCacheSizes
from hyper_parallel.inference.kv_cache.tiers import KVTiers
from hyper_parallel.offloading.tiers import Pending
from inference.opened_tiers import opened
from inference.small_models import prompts, small


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


class _SlowRead:
    """A read that is over when it is waited for."""

    def __init__(self, pending: Pending) -> None:
        self._pending, self._waited = pending, False

    def done(self) -> bool:
        return self._waited

    def wait(self) -> float:
        self._waited = True
        return self._pending.wait()


def test_passes_wait_for_short_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose prefix lies in a tier runs beside the others, instead of after them."""
    model = small("llama")
    beginning = [7 + place % 50 for place in range(64)]
    generator = Generator(model, page=16, max_tokens=20)
    generator._engine.cache.configure(KVCacheSizes(device=9, host=60), opened(("host",), tmp_path))
    read = KVTiers.begin_read
    monkeypatch.setattr(KVTiers, "begin_read", lambda *given: _SlowRead(read(*given)))

    def passes(short: int) -> int:
        monkeypatch.setattr(kv_memory, "SHORT", short)
        generator([beginning])
        # The beginning moves to the host.
        generator([[3] * 100])
        before = generator._engine.passes
        generator([[4] * 8, [*beginning, 5]])
        return generator._engine.passes - before

    beside, behind = passes(1 << 20), passes(0)
    assert generator._engine.cache.report.fetched
    # A prompt of a piece, 19 tokens, and the pass that the second prompt shares with the first.
    assert beside < 25 < behind
