"""What a strategy asks of a step's graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.captured import family_config, recipe_of
from harness.families import FAMILIES
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.graph import StepGraph, is_collective, rewritten
from hyper_parallel.offloading.pass_pipeline import passes
from hyper_parallel.step.capture_train_step import BatchShape, capture_step


def _gathers(step: StepGraph) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in step.nodes:
        if is_collective(node) and "all_gather" in str(node.target):
            found[node.meta["module"]] = found.get(node.meta["module"], 0) + 1
    return found


@pytest.mark.parametrize(
    ("memory", "again"),
    [
        ({}, {"model.layers.0", "model.layers.1"}),
        ({"reshard_after_forward": {"*.1": False}}, {"model.layers.0"}),
        ({"reshard_after_forward": False}, set()),
        ({"shard": "gradients"}, set()),
    ],
)
def test_layers_are_gathered_again_as_the_strategy_says(memory: dict[str, Any], again: set[str]) -> None:
    config = family_config(FAMILIES["llama"], {"axes": {"shard": 2}, "memory": memory}, None)
    with fake_ranks(2, 0), torch.device("cpu"):
        step = capture_step(recipe_of(FAMILIES["llama"], config), BatchShape(((2, 16),), (False,)))
    before = _gathers(step)
    after = _gathers(rewritten(step, passes(config.strategy, ordered=False)))
    assert before.keys() == after.keys()
    assert {module for module in before if after[module] > before[module]} == again
