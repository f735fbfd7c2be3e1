"""The last page of a prompt, filled in part, is computed once for its answers and copied: the bits of computing it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness import run_ranks
from harness.observer import Observer
from hyper_parallel import Strategy
from hyper_parallel.inference import Completion, Generator
from hyper_parallel.inference.kv_cache.page_pool import PagePool, keys_of, tail_key
from hyper_parallel.inference.kv_cache.sizes import KVCacheSizes
from inference.opened_tiers import opened
from inference.small_models import prompts, small

LENGTHS = (70, 3, 64, 33)
SETTINGS: dict[str, Any] = {"page": 16, "n": 5, "temperature": 1.0, "max_tokens": 20, "logprobs": True}


def bits(answers: list[Completion]) -> list[object]:
    return [(answer.tokens, answer.logprobs, answer.finish) for answer in answers]


def computed(model: Any, given: list[list[int]], **settings: Any) -> list[object]:
    """Without sharing."""
    return bits(Generator(model, **{**SETTINGS, **settings}, prefix_cache=False)(given))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"batch": 3, "max_tokens": 1}),
        ("gemma3", {"batch": 1, "pages": 6}),
        ("gpt-oss", {"batch": 2, "pages": 12}),
        ("deepseek-v3", {"kv_dtype": "int8"}),
        ("qwen3-moe", {"rows": 32, "batch": 3}),
    ],
)
def test_bits_are_those_of_computing_it_for_each_answer(family: str, settings: dict[str, Any]) -> None:
    model = small(family)
    given = prompts(model, LENGTHS)
    generator = Generator(model, **{**SETTINGS, **settings})
    assert bits(generator(given)) == computed(model, given, **settings)
    # Every token of a prompt is computed once.
    assert generator.shared == 4 * sum(LENGTHS)


def test_a_stop_token_that_comes_first_ends_an_answer() -> None:
    model = small("llama")
    given = prompts(model, (20, 33))
    plain = Generator(model, **SETTINGS, prefix_cache=False)
    first = {answer.tokens[0] for answer in plain(given)}
    generator = Generator(model, **SETTINGS)
    generator._engine.eos = plain._engine.eos = frozenset(sorted(first)[::2])
    found = bits(generator(given, batch=3))
    assert found == bits(plain(given))
    assert any(not tokens for tokens, *_ in found)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("family", "device", "tiers"), [("llama", 9, ("host",)), ("gemma3", 4, ("host", "flash"))]
)
def test_with_tiers(family: str, device: int, tiers: tuple[str, ...], tmp_path: Path) -> None:
    """Requests are swapped, or are longer than the device's memory; a page that is gone is computed again."""
    model = small(family)
    given = prompts(model, LENGTHS)
    generator = Generator(model, **SETTINGS)
    cache = generator._engine.cache
    cache.configure(KVCacheSizes(device=device, **dict.fromkeys(tiers, 200)), opened(tiers, tmp_path))
    expected = computed(model, given)
    try:
        for _ in range(2):
            assert bits(generator(given)) == expected
        assert cache.report.swapped + cache.report.streamed
        opened_now = cache._open
        assert opened_now is not None
        pool = opened_now[1]
        assert pool.available == device, "a page is lost"
        assert not pool._copied, "a tail outlives its answers"
        # A run that is given up leaves none behind either.
        next(generator.stream(given))
        assert pool.available == device
        assert not pool._copied
    finally:
        generator.close()


def test_within_a_budget(tmp_path: Path) -> None:
    model = small("llama")
    given = prompts(model, LENGTHS)
    expected = computed(model, given)
    with Generator(model, memory={"device": "1GiB", "flash": str(tmp_path)}, **SETTINGS) as generator:
        assert generator.memory is not None
        least = generator.smallest_budget(given)
        for budget in (least, least + 100_000):
            generator.memory.budget = budget
            with Observer(generator.memory.stream.tensors()) as seen:
                assert bits(generator(given)) == expected
            assert seen.peak <= budget
        assert generator.shared > 4 * 64


def _rank(rank: int, world: int, folder: str, given: list[list[int]]) -> tuple[bool, int]:
    generator = Generator(folder, strategy=Strategy(axes={"context": 2}), **SETTINGS)
    found = bits(generator(given, batch=3))
    shared = generator.shared
    return found == bits(generator(given, prefix_cache=False)), shared


def test_with_context_ranks_each_copies_its_part(tmp_path: Path) -> None:
    model: Any = small("llama")
    model.save_pretrained(tmp_path)
    for same, shared in run_ranks(_rank, 2, str(tmp_path), prompts(model, LENGTHS)):
        assert same
        assert shared == 4 * sum(LENGTHS)


def test_a_key_of_a_part_is_none_of_a_whole_page() -> None:
    tokens = list(range(32))
    keys = keys_of([*tokens, 0], 16)
    assert tail_key(tokens[16:], keys[:1]) not in keys
    assert tail_key(tokens[:16], []) not in keys
    pool = PagePool(2)
    [page, other] = pool.allocate(2) or []
    pool.register(b"tail", page, copied=True)
    pool.register(b"whole", other)
    pool.release([page, other])
    seen = list[tuple[bytes, int]]()
    pool.evicted, pool.block = seen.extend, 2
    assert pool.allocate(1) is not None
    assert seen == [(b"whole", other)], "a page that is filled in part is in no tier"


def test_answers_of_one_token_end_without_a_pass_where_pages_are_few(tmp_path: Path) -> None:
    """A request that ends with its first token is not given further pages, nor swapped out.

    Few pages make other batches, in which some processors round otherwise.
    """
    model = small("llama")
    given = prompts(model, (48, 48, 70))
    settings = {"max_tokens": 1, "n": 6}
    generator = Generator(model, **{**SETTINGS, **settings})
    generator._engine.cache.configure(KVCacheSizes(device=6, host=60), opened(("host",), tmp_path))
    try:
        found = generator(given)
    finally:
        generator.close()
    expected = Generator(model, **{**SETTINGS, **settings}, prefix_cache=False)(given)
    assert [(one.tokens, one.finish) for one in found] == [(one.tokens, one.finish) for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
