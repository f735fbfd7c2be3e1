"""What is done before the first step grows with the number of layers, and no faster: calls of Python functions counted,
since a machine's seconds depend on what else it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.config.train import AdamWConfig, LossConfig, ScheduleConfig
from hyper_parallel.graph import Pass, Rewrite, StepGraph
from hyper_parallel.graph.execute import executable
from hyper_parallel.graph.graph_file import from_bytes, to_bytes
from hyper_parallel.offloading.pass_pipeline import passes
from hyper_parallel.shard import parallelize, sharded
from hyper_parallel.step.accumulation import rewritten_loop
from hyper_parallel.step.capture_train_step import MicroBatchShape, capture_one
from hyper_parallel.step.lr_schedule import schedule
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.step.recipe import Recipe
from hyper_parallel.strategy import Strategy

FEW = 4
MOST = 2.3
"""Of the calls for twice as many layers, by those for the layers."""
STRATEGIES: dict[str, Mapping[str, Any]] = {
    "shard": {"axes": {"shard": 2}},
    "gathered once": {"axes": {"shard": 2}, "memory": {"shard": "optimizer"}},
    "recomputed, ordered": {
        "axes": {"shard": 2, "tensor": 2},
        "sequence": True,
        "memory": {"recompute": "layer"},
        "overlap": {"cluster": "h100x4", "pieces": False},
    },
}


def _step(layers: int, strategy: Strategy) -> StepGraph:
    config = AutoConfig.for_model(
        "llama",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parallelize(model, strategy, lowering="traceable")
    recipe = Recipe(
        model,
        sharded(model),
        build_optimizer(model, AdamWConfig()),
        schedule(ScheduleConfig(), 1),
        loss=LossConfig(),
    )
    return capture_one(recipe, MicroBatchShape(2, 16, False), 4)


def _calls(does: Callable[[], object]) -> int:
    """Calls of Python's functions."""
    count = 0

    def called(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(called)
    try:
        does()
    finally:
        sys.setprofile(None)
    return count


def _work(layers: int, fields: Mapping[str, Any], *further: Pass) -> tuple[int, int]:
    """Calls of the passes, and of writing, reading and making executables."""
    strategy = Strategy.model_validate({"version": 1, "check": False, **fields})
    with fake_ranks(strategy.axes.world, 0):
        step = _step(layers, strategy)
        found: list[StepGraph] = []

        def rewritten() -> None:
            every = (*passes(strategy, None, "cpu"), *further)
            found.append(rewritten_loop(step, strategy.memory.shard, 4, every).body)

        def kept() -> None:
            read, _ = from_bytes(to_bytes(found[0]), found[0].groups)
            executable(read)

        return _calls(rewritten), _calls(kept)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_twice_the_layers_are_twice_the_work(strategy: str) -> None:
    once, twice = (_work(layers, STRATEGIES[strategy]) for layers in (FEW, 2 * FEW))
    for few, many in zip(once, twice, strict=True):
        assert few > 1000
        assert many / few <= MOST


def test_a_quadratic_pass_is_seen() -> None:
    """The count that the other test relies on."""

    def quadratic(step: StepGraph) -> StepGraph:
        made = step.copy()
        for node in made.nodes:
            if node.users:
                next((other for other in made.nodes if other is node), None)
        return made

    once, twice = (
        _work(layers, STRATEGIES["shard"], Rewrite("quadratic", quadratic))[0] for layers in (FEW, 2 * FEW)
    )
    assert twice / once > MOST
