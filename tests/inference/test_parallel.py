"""A model that is parallelized generates the tokens of one device, on every rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from harness import run_ranks
from hyper_parallel import Strategy, parallelize
from hyper_parallel.errors import UnsupportedModelError
from hyper_parallel.inference import Generator
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
