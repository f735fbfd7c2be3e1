"""A model that is parallelized generates the tokens of one device, on every rank."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from harness import run_ranks
from hyper_parallel import Strategy, parallelize
from hyper_parallel.config.inference import Sampling
from hyper_parallel.errors import UnsupportedModelError
from hyper_parallel.inference import Generator, Request
from hyper_parallel.inference.split_requests import split
from inference.small_models import prompts, small

TOKENS = 16


def _rank(rank: int, world: int, family: str, axes: dict[str, int]) -> list[list[int]]:
    model = copy.deepcopy(small(family))
    parallelize(model, Strategy(axes=axes))
    return [answer.tokens for answer in Generator(model, max_tokens=TOKENS)(prompts(model))]


@pytest.mark.parametrize(
    ("family", "axes"),
    [
        ("llama", {"tensor": 2}),
        ("gemma3", {"tensor": 2}),
        ("deepseek-v3", {"tensor": 2}),
        ("gpt-oss", {"tensor": 2}),
        ("mixtral", {"shard": 2, "expert": 2}),
        ("llama", {"replicate": 2}),
        ("llama", {"shard": 2}),
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
