"""Pinned beginnings of prompts stay on the device from run to run, within a budget, and change no bits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import run_ranks
from harness.observer import Observer
from hyper_parallel import Strategy
from hyper_parallel.errors import ConfigError
from hyper_parallel.inference import Completion, Generator
from hyper_parallel.inference.kv_cache.page_pool import PagePool
from inference.small_models import prompts, small

SETTINGS: dict[str, Any] = {"page": 16, "max_tokens": 8, "logprobs": True}
SYSTEM = [7 + place % 50 for place in range(70)]
"""Fills 4 pages."""
QUESTIONS = [[*SYSTEM, 3, 4], [*SYSTEM, 9]]
OTHERS = [[seed] * 90 for seed in range(1, 5)]
"""Of 7 pages each."""


def bits(answers: list[Completion]) -> list[object]:
    return [(answer.tokens, answer.logprobs) for answer in answers]


@pytest.mark.parametrize("pages", [None, 7])
def test_pinned_pages_are_found_again_whatever_ran_in_between(pages: int | None) -> None:
    model = small("llama", intermediate_size=64)
    expected = bits(Generator(model, **SETTINGS, prefix_cache=False)([*QUESTIONS, *OTHERS]))
    generator = Generator(model, **SETTINGS, pages=pages)
    with generator.pinned([SYSTEM]):
        assert generator.cache_report.pinned == 0
        assert bits(generator(QUESTIONS)) == expected[:2]
        assert generator.shared == 64, "the first question computes them"
        assert generator.cache_report.pinned == 4
        for again in (False, True):
            assert bits(generator(OTHERS)) == expected[2:]
            assert bits(generator(QUESTIONS)) == expected[:2]
            # A run that needs more pages than those before has a new cache.
            assert generator.shared == (128 if again or pages else 64)
        with generator.pinned([SYSTEM[:20], OTHERS[0]]):
            assert bits(generator([*OTHERS, *QUESTIONS])) == [*expected[2:], *expected[:2]]
            # 5 pages of the other prompt; the one that the system prompt begins with was pinned before.
            assert generator.cache_report.pinned == 4 + 5
        assert generator.cache_report.pinned == 4
    assert generator.cache_report.pinned == 0
    assert bits(generator(QUESTIONS)) == expected[:2]
    assert generator.shared == 64, "each run has a cache of its own again"


def test_pinned_pages_of_another_hook_or_forward_are_computed_again() -> None:
    """Neither of them changes a weight or an attribute of a module."""
    model: Any = copy.deepcopy(small("llama", intermediate_size=64))
    added = {"vector": torch.zeros(model.config.hidden_size)}
    layer = model.model.layers[0]
    layer.register_forward_hook(lambda module, inputs, output: output + added["vector"])
    generator = Generator(model, **SETTINGS)
    with generator.pinned([SYSTEM]):
        before = bits(generator(QUESTIONS))
        assert bits(generator(QUESTIONS)) == before and generator.shared == 128
        added["vector"] = torch.linspace(-1, 1, model.config.hidden_size)
        assert bits(generator(QUESTIONS)) == bits(Generator(model, **SETTINGS)(QUESTIONS)) != before
        added["vector"].mul_(-1)
        assert bits(generator(QUESTIONS)) == bits(Generator(model, **SETTINGS)(QUESTIONS))
        own = layer.mlp.forward
        layer.mlp.forward = lambda x: own(x) + x
        assert bits(generator(QUESTIONS)) == bits(Generator(model, **SETTINGS)(QUESTIONS))
        generator(QUESTIONS)
        assert generator.shared == 128


def test_pinned_pages_of_other_weights_are_computed_again() -> None:
    model: Any = copy.deepcopy(small("llama", intermediate_size=64))
    generator = Generator(model, **SETTINGS)
    with generator.pinned([SYSTEM]):
        generator(QUESTIONS)
        model.model.norm.weight.data.mul_(-1)
        found = bits(generator(QUESTIONS))
        assert generator.shared == 64
        assert generator.cache_report.pinned == 4
    assert found == bits(Generator(model, **SETTINGS)(QUESTIONS))


@pytest.mark.parametrize("tiers", [{}, {"host": "64MiB"}])
def test_a_budget_has_room_for_them(tiers: dict[str, Any]) -> None:
    model = small("llama", intermediate_size=64)
    expected = bits(Generator(model, **SETTINGS)([*QUESTIONS, *OTHERS]))
    with Generator(model, memory={"device": "1GiB", **tiers}, **SETTINGS) as generator:
        assert generator.memory is not None
        before = generator.smallest_budget([*QUESTIONS, *OTHERS])
        with generator.pinned([SYSTEM]):
            least = generator.smallest_budget([*QUESTIONS, *OTHERS])
            size = generator.memory._sizes.page
            assert before < least <= before + 4 * size
            for budget in (least, least + 60_000):
                generator.memory.budget = budget
                with Observer(generator.memory.stream.tensors()) as seen:
                    for _ in range(2):
                        assert bits(generator(QUESTIONS)) == expected[:2]
                        assert bits(generator(OTHERS)) == expected[2:]
                assert seen.peak <= budget
                assert generator.cache_report.pinned == 4
                generator(QUESTIONS)
                assert generator.shared >= 2 * 64
            generator.memory.budget = least - 1
            with pytest.raises(ConfigError, match=r"of pinned prompts \(pin less\)"):
                generator([*QUESTIONS, *OTHERS])
        generator.memory.budget = before - size
        with pytest.raises(ConfigError, match="needs at least"), generator.pinned([SYSTEM, *OTHERS]):
            pass
        assert generator._engine.cache.pinned == 0


def test_what_cannot_be_pinned_is_refused() -> None:
    generator = Generator(small("llama", intermediate_size=64), **SETTINGS)
    with (
        pytest.raises(ConfigError, match="pinned: 3 tokens fill no page of 16 tokens"),
        generator.pinned([[1, 2, 3]]),
    ):
        pass
    plain = Generator(small("llama", intermediate_size=64), **SETTINGS, prefix_cache=False)
    with pytest.raises(ConfigError, match="prefix_cache is false"), plain.pinned([SYSTEM]):
        pass
    answers = generator.stream(prompts(generator.model, (20, 30)))
    next(answers)
    with pytest.raises(ConfigError, match="is under way"), generator.pinned([SYSTEM]):
        pass


def _rank(rank: int, world: int, folder: str) -> tuple[bool, int, int]:
    generator = Generator(folder, strategy=Strategy(axes={"context": 2}), **SETTINGS)
    plain = bits(generator(QUESTIONS, prefix_cache=False))
    with generator.pinned([SYSTEM]):
        same = all(bits(generator(QUESTIONS)) == plain for _ in range(2))
        return same, generator.shared, generator.cache_report.pinned


def test_context_ranks_pin_their_part(tmp_path: Path) -> None:
    model: Any = small("llama", intermediate_size=64)
    model.save_pretrained(tmp_path)
    # Two groups of two pages. Weights of a parallelized model may change between runs, and each run computes them.
    assert run_ranks(_rank, 2, str(tmp_path)) == [(True, 64, 2)] * 2


def test_no_pinned_page_is_given_up() -> None:
    pool = PagePool(3)
    pool.pin([b"a"])
    [page, other] = pool.allocate(2) or []
    pool.register(b"a", page)
    pool.register(b"b", other)
    pool.release([page, other])
    assert pool.available == 2
    assert pool.allocate(2) == [other, 2] or pool.available == 0
    assert pool.holds(b"a")
    assert not pool.holds(b"b")
    pool.forget()
    assert pool.available == 1
    assert pool.pinned == 0
