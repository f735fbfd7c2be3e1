"""A byte budget for weights and KV cache: the same tokens with either in any tier, and never more live bytes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.observer import OfPyTorch
from hyper_parallel.config.inference import Inference, Sampling
from hyper_parallel.errors import ConfigError
from hyper_parallel.inference import Completion, Generator, Request
from hyper_parallel.inference.kv_cache.sizes import LayerShape, page_bytes
from hyper_parallel.inference.memory_needs import Needs
from hyper_parallel.inference.memory_plan import Module, Sizes
from inference.small_models import prompts, small

SETTINGS: dict[str, Any] = {"page": 16, "max_tokens": 5, "logprobs": True, "n": 2, "temperature": 1.0}
LENGTHS = (90, 40)


def memory(tier: str, folder: Path) -> dict[str, Any]:
    return {"device": "1GiB", tier: str(folder) if tier == "flash" else "512MiB"}


def bits(answers: list[Completion]) -> list[object]:
    return [(answer.tokens, answer.logprobs) for answer in answers]


def moved(generator: Generator) -> int:
    """Bytes of the KV cache until now."""
    return sum(one.written + one.read for one in generator.cache_report.tiers)


@pytest.mark.parametrize(
    ("family", "tier"),
    [
        ("llama", "host"),
        ("gemma3", "flash"),
        ("gpt-oss", "pool"),
        ("deepseek-v3", "flash"),
        ("mixtral", "pool"),
    ],
)
def test_bits_are_those_without_a_budget(family: str, tier: str, tmp_path: Path) -> None:
    model = small(family)
    given = prompts(model, LENGTHS)
    plain = bits(Generator(model, **SETTINGS)(given))
    with Generator(model, memory=memory(tier, tmp_path), **SETTINGS) as generator:
        assert generator.memory is not None
        least = generator.smallest_budget(given)
        generator.memory.budget = least
        with OfPyTorch(generator.memory.stream.tensors()) as seen:
            assert bits(generator(given)) == plain
        assert seen.peak <= least
        assert generator.memory.plan is not None
        assert generator.memory.plan.device <= least
        # Larger: requests are streamed where the number of pages says so; with room for all, prefixes outlive a run.
        generator.memory.budget = least + 200_000
        with OfPyTorch(generator.memory.stream.tensors()) as seen:
            assert bits(generator(given, pages=5)) == plain
            assert generator.cache_report.streamed
            assert moved(generator)
            assert generator.unused_tiers == ()
        assert seen.peak <= least + 200_000
        generator.memory.budget = 1 << 30
        assert bits(generator(given)) == plain
        before = generator.shared
        assert bits(generator(given)) == plain
        assert generator.shared > before
        generator.memory.budget = least - 1
        with pytest.raises(ConfigError, match=f"needs at least {least} "):
            generator(given)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_context_leaves_where_weights_would_cost_more() -> None:
    """A request of 100 MiB beside weights of 500 MiB: of both, what is read in each pass is as little as can be."""
    mib = 1 << 20
    shapes = [LayerShape((8, 128), (8, 128), 4)] * 16
    sizes = Sizes(tuple(Module(f"{place}", 50 * mib) for place in range(10)), 0, page_bytes(shapes, 16))
    request = Request(ids=(0,) * 700, sampling=Sampling(max_tokens=101))
    for room, weights, context in (({"host": 1 << 40}, 0, 80 * mib), ({}, 200 * mib, 0)):
        needs = Needs(sizes, shapes, 16, [request], Inference(page=16), room)
        plan = needs.plan(560 * mib, 1, mib)
        assert plan is not None
        assert plan.device <= 560 * mib
        assert (plan.read == 0) == (weights == 0)
        assert plan.read <= weights
        assert (plan.cache.read == 0) == (context == 0)
        assert plan.cache.read <= context
        least = needs.floor(1, mib)
        assert needs.plan(least, 1, mib) is not None
        assert needs.plan(least - 1, 1, mib) is None


@pytest.mark.parametrize("budget", [0, 1 << 30])
def test_other_weights_drop_prefixes(budget: int) -> None:
    """Weights in a tier cannot change; of those on the device a change is seen, and so is a weight that is replaced."""
    model: Any = copy.deepcopy(small("llama", hidden_size=96, intermediate_size=256, num_hidden_layers=4))
    given = prompts(model, (70,))
    with Generator(model, memory={"device": "1GiB", "host": "64MiB"}, page=16, max_tokens=2) as generator:
        assert generator.memory is not None
        generator.memory.budget = budget or generator.smallest_budget(given) + 300_000
        version = generator._engine.cache.version
        generator(given)
        before = version()
        assert before is not None
        generator(given)
        assert generator.memory.plan is not None
        assert bool(budget) == (generator.memory.plan.read == 0)
        if budget:  # the smaller one may have no room for buffers of a tier
            assert generator.shared == 64
        assert version() == before
        model.model.norm.weight.data.mul_(-1)
        assert version() != before
        generator(given)
        assert generator.shared == 0
        before = version()
        layer = model.model.layers[0].mlp.up_proj
        own = layer._parameters["weight"]
        layer._parameters["weight"] = own.clone() if budget else nn.Parameter(torch.ones(2))
        assert version() != before
