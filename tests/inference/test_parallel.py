"""A model that is parallelized generates the tokens of one device, on every rank."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from harness import run_ranks
from hyper_parallel import Strategy, parallelize
from hyper_parallel.config.inference import Sampling
from hyper_parallel.errors import ConfigError, UnsupportedModelError
from hyper_parallel.inference import Generator, Request
from hyper_parallel.inference.ragged_pass import Segment
from hyper_parallel.inference.rank_groups import ContextGroup
from hyper_parallel.inference.worker import split
from inference.small_models import prompts, small

TOKENS = 16


def _rank(rank: int, world: int, family: str, axes: dict[str, int]) -> list[list[int]]:
    model = copy.deepcopy(small(family))
    parallelize(model, Strategy(axes=axes))
    return [answer.tokens for answer in Generator(model, max_tokens=TOKENS)(prompts(model))]


@pytest.mark.parametrize(
    ("family", "axes"),
    [
        ("gemma3", {"tensor": 2}),
        ("deepseek-v3", {"tensor": 2}),
        ("gpt-oss", {"tensor": 2}),
        ("mixtral", {"shard": 2, "expert": 2}),
        ("llama", {"replicate": 2}),
        ("llama", {"tensor_x": 2, "tensor_y": 2}),
    ],
)
def test_tokens_are_those_of_one_device(family: str, axes: dict[str, int]) -> None:
    model = small(family)
    expected = [answer.tokens for answer in Generator(model, max_tokens=TOKENS)(prompts(model))]
    for found in run_ranks(_rank, Strategy(axes=axes).axes.world, family, axes):
        assert found == expected


def _refused(rank: int, world: int, axes: dict[str, Any]) -> str:
    model = copy.deepcopy(small("llama"))
    parallelize(model, Strategy(axes=axes))
    with pytest.raises(UnsupportedModelError) as refused:
        Generator(model)
    return str(refused.value)


def test_context_is_refused() -> None:
    assert all("axes.context" in said for said in run_ranks(_refused, 2, {"context": 2}))


def _from_folder(rank: int, world: int, folder: str, axes: dict[str, int]) -> tuple[list[list[int]], int]:
    generator = Generator(folder, strategy=Strategy(axes=axes), max_tokens=TOKENS)
    held = sum(
        one.to_local().numel() if hasattr(one, "to_local") else one.numel()
        for one in generator.model.parameters()
    )
    return [answer.tokens for answer in generator(prompts(generator.model))], held


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"shard": 2}])
def test_each_worker_loads_its_shards(axes: dict[str, int], tmp_path: Path) -> None:
    model: Any = small("llama")
    model.save_pretrained(tmp_path)
    expected = [answer.tokens for answer in Generator(model, max_tokens=TOKENS)(prompts(model))]
    whole = sum(one.numel() for one in model.parameters())
    for tokens, held in run_ranks(_from_folder, 2, str(tmp_path), axes):
        assert tokens == expected
        assert 0.45 * whole < held < 0.6 * whole


def _context(rank: int, world: int, folder: str, axes: dict[str, int]) -> tuple[Any, Any, bool]:
    generator = Generator(folder, strategy=Strategy(axes=axes), max_tokens=TOKENS, page=16, logprobs=True)
    given = prompts(generator.model)
    found = generator(given)
    # The longest alone: several of its pieces are in one pass, at other rows.
    alone = generator([given[5]])
    same = alone[0].tokens == found[5].tokens and alone[0].logprobs == found[5].logprobs
    return [one.tokens for one in found], [one.logprobs for one in found], same


@pytest.mark.parametrize(
    ("family", "axes"),
    [
        ("gemma3", {"context": 2}),
        ("gpt-oss", {"context": 2}),
        ("deepseek-v3", {"context": 2}),
        ("llama", {"replicate": 2, "context": 2}),
    ],
)
def test_context_has_the_tokens_of_one_device_and_the_same_bits_in_any_company(
    family: str, axes: dict[str, int], tmp_path: Path
) -> None:
    model: Any = small(family)
    model.save_pretrained(tmp_path)
    expected = Generator(model, max_tokens=TOKENS, page=16, logprobs=True)(prompts(model))
    for tokens, logprobs, same in run_ranks(_context, Strategy(axes=axes).axes.world, str(tmp_path), axes):
        assert tokens == [one.tokens for one in expected]
        for own, other in zip(logprobs, expected, strict=True):
            assert own == pytest.approx(other.logprobs, abs=1e-4)
        assert same


def test_a_context_group_computes_each_token_once_where_its_page_is() -> None:
    group = ContextGroup(1, 3, page=16)
    # A long piece in mid-prompt, the newest token of another request, and a short prompt.
    segments = [Segment(0, 40, 96, ()), Segment(40, 1, 70, ()), Segment(41, 5, 0, ())]
    pieces = group.pieces(segments)
    assert [[(one.segment, one.start, one.count, one.first) for one in part] for part in pieces] == [
        [(0, 0, 16, 96), (2, 16, 5, 0)],
        [(0, 0, 16, 112), (1, 16, 1, 70)],
        [(0, 0, 8, 128)],
    ]
    assert group.length(pieces) == 32
    every = [ContextGroup(rank, 3, page=16) for rank in range(3)]
    assert [one.local(136) for one in every] == [48, 48, 40]
    assert [one.local(71) for one in every] == [32, 23, 16]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"context": 2, "expert": 2}, "must divide shard · tensor"),
        ({"pipeline": 2}, "does not run pipelines"),
    ],
)
def test_strategies_that_generation_cannot_do_are_refused(axes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Generator("unread", strategy=Strategy(axes=axes))


def test_requests_are_split_evenly_and_answers_to_a_prompt_stay_together() -> None:
    lengths = [5, 50, 7, 300, 20, 20, 90, 10]
    requests = [
        Request(ids=(1,) * length, sampling=Sampling(max_tokens=10), row=row, sample=sample)
        for row, length in enumerate(lengths)
        for sample in range(2)
    ]
    parts = split(requests, 3)
    assert sorted(place for part in parts for place in part) == list(range(len(requests)))
    loads = [sum(len(requests[place].ids) + 10 for place in part) for part in parts]
    # The longest prompt alone is more than a third.
    assert sorted(loads) == [270, 274, 620]
    for part in parts:
        assert {place ^ 1 for place in part} == set(part)
    alone = split(requests[6:8], 2)
    assert alone == [[0], [1]]
