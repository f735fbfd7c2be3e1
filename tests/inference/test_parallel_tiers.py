"""Byte budgets on several ranks: the tokens of one device, tiers that are used on every rank, and equal decisions."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness import run_ranks
from harness.observer import Observer
from hyper_parallel import Strategy
from hyper_parallel.config.generate import GenerationStrategy
from hyper_parallel.errors import ConfigError
from hyper_parallel.inference import Generator
from inference.small_models import prompts, small

SETTINGS: dict[str, Any] = {"page": 16, "max_tokens": 12, "logprobs": True}
LENGTHS = (190, 40, 61, 17)
PAGES = 5
"""On the device, of which the longest request needs 13, or 7 of the pages of two context ranks."""


class Found(NamedTuple):
    """What one rank reports."""

    answers: list[object]
    again: list[object]
    moved: int
    peak: int
    budget: int
    counts: tuple[int, ...]
    unused: tuple[str, ...]


def _rank(
    rank: int, world: int, family: str, folder: str, axes: dict[str, int], tier: dict[str, str]
) -> tuple[Found, Any]:
    given = prompts(small(family), LENGTHS)
    with Generator(folder, strategy=Strategy(axes=axes), **SETTINGS) as generator:
        plain = [(one.tokens, one.logprobs) for one in generator(given)]
    memory = {"device": "1GiB", **tier}
    strategy = GenerationStrategy.model_validate({"axes": axes, "memory": memory})
    with Generator(folder, strategy=strategy, **SETTINGS) as generator:
        assert generator.memory is not None
        least = generator.smallest_budget(given, pages=PAGES)
        generator.memory.budget = least
        with Observer(generator.memory.stream.tensors()) as seen:
            answers = [(one.tokens, one.logprobs) for one in generator(given, pages=PAGES)]
        report = generator.cache_report
        counts = (report.streamed, report.swapped, report.fetched, *(one.written for one in report.tiers))
        again = [(one.tokens, one.logprobs) for one in generator(given[::-1], pages=PAGES)][::-1]
        moved = sum(one.written + one.read for one in report.tiers)
        return Found(answers, again, moved, seen.peak, least, counts, generator.unused_tiers), plain


@pytest.mark.parametrize(
    ("family", "axes", "tier"),
    [
        pytest.param("gemma3", {"tensor": 2}, "flash", marks=pytest.mark.matrix),
        pytest.param("deepseek-v3", {"tensor": 2}, "pool", marks=pytest.mark.matrix),
        ("gpt-oss", {"tensor": 2}, "host"),
        pytest.param("gpt-oss", {"tensor_x": 2, "tensor_y": 2}, "host", marks=pytest.mark.matrix),
        ("mixtral", {"shard": 2, "expert": 2}, "flash"),
        ("llama", {"context": 2}, "flash"),
        pytest.param("gemma3", {"context": 2}, "host", marks=pytest.mark.matrix),
        ("deepseek-v3", {"context": 2}, "pool"),
        pytest.param("llama", {"tensor": 2, "context": 2}, "host", marks=pytest.mark.matrix),
    ],
)
def test_bits_are_those_without_a_budget_on_every_rank(
    family: str, axes: dict[str, int], tier: str, tmp_path: Path
) -> None:
    world = Strategy(axes=axes).axes.world
    place = {tier: str(tmp_path / "flash") if tier == "flash" else "64MiB"}
    model: Any = small(family)
    model.save_pretrained(tmp_path / "model")
    ranks = run_ranks(_rank, world, family, str(tmp_path / "model"), axes, place)
    for found, plain in ranks:
        assert found.answers == plain
        assert found.again == plain
        assert found.moved
        assert found.peak <= found.budget
        assert found.unused == ()
        assert found.counts == ranks[0][0].counts
        assert found.budget == ranks[0][0].budget
    assert not [path for path in (tmp_path / "flash").rglob("*") if path.is_file()]


def _too_small(rank: int, world: int, folder: str) -> tuple[str, list[int]]:
    strategy = GenerationStrategy.model_validate({"axes": {"tensor": 2}, "memory": {"device": 1000}})
    with pytest.raises(ConfigError) as refused:
        Generator(folder, strategy=strategy, **SETTINGS)
    said = str(refused.value)
    least = int(said.split("needs at least ")[1].split()[0])
    # The advice, as it says.
    memory = {"device": least, "host": "64MiB"}
    strategy = GenerationStrategy.model_validate({"axes": {"tensor": 2}, "memory": memory})
    with Generator(folder, strategy=strategy, **SETTINGS) as generator:
        return said, generator([[1, 2, 3]])[0].tokens


def test_a_budget_that_is_too_small_says_how_much_it_needs(tmp_path: Path) -> None:
    model: Any = small("llama")
    model.save_pretrained(tmp_path)
    expected = Generator(model, **SETTINGS)([[1, 2, 3]])[0].tokens
    for said, tokens in run_ranks(_too_small, 2, str(tmp_path)):
        assert "spread the model over more devices" in said
        assert tokens == expected
