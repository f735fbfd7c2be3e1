"""How often a step of three micro-batches gathers a parameter and reduces its gradient, by `memory.shard`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tiny_run import LLAMA
from transformers import LlamaConfig, LlamaForCausalLM

from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.config.train import AdamWConfig, LossConfig, ScheduleConfig
from hyper_parallel.graph.accumulate import when_of
from hyper_parallel.shard import parallelize, sharded
from hyper_parallel.step.accumulation import whole_step
from hyper_parallel.step.capture_train_step import BatchShape
from hyper_parallel.step.graph_cache import Graphs
from hyper_parallel.step.lr_schedule import schedule
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.step.recipe import Recipe
from hyper_parallel.strategy import Strategy

MICRO = 3


def _collectives(declared: dict[str, Any]) -> tuple[Counter[str], int]:
    """How many of each kind the step calls in forward and backward passes; the number of parameters."""
    settings = {key: value for key, value in LLAMA.items() if key != "model_type"}
    strategy = Strategy.model_validate(declared)
    with fake_ranks(strategy.axes.world, 0):
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **settings))
        parallelize(model, strategy, lowering="traceable")
        recipe = Recipe(
            model,
            sharded(model),
            build_optimizer(model, AdamWConfig()),
            schedule(ScheduleConfig(name="constant"), 1),
            loss=LossConfig(chunk="none"),
        )
        graphs = Graphs(recipe, "cpu")
        graphs.ordered = False  # each parameter by its own collectives
        shape = BatchShape(((1, 16),) * MICRO, (False,) * MICRO)
        assert graphs.ready(shape), graphs.refused
        loop = graphs[shape].loop
        assert loop is not None
        found: Counter[str] = Counter()
        for node in loop.body.nodes:
            if "c10d" in str(node.target) and node.meta["region"].phase in ("forward", "loss", "backward"):
                found[str(node.target).split(".")[1]] += MICRO if when_of(node) == "each" else 1
        whole = whole_step([loop] * MICRO)
        nodes = [n for n in whole.nodes if n.meta["region"].phase in ("forward", "loss", "backward")]
        names = (str(node.target).split(".")[1] for node in nodes if "c10d" in str(node.target))
        assert Counter(names) == found
        return found, len(list(model.parameters()))


@pytest.mark.parametrize(
    ("memory", "gathers", "scatters"),
    [
        # Those of the model's root stay; the layers' 18 are gathered again for the backward pass.
        ({"shard": "parameters"}, lambda n: MICRO * (n + 18), MICRO),
        ({"shard": "parameters", "reshard_after_forward": False}, lambda n: MICRO * n, MICRO),
        ({"shard": "gradients"}, lambda n: n, MICRO),
        ({"shard": "optimizer"}, lambda n: n, 1),
    ],
    ids=["parameters", "not-resharded", "gradients", "optimizer"],
)
def test_gathers_and_scatters_of_each_level(memory: dict[str, Any], gathers: Any, scatters: int) -> None:
    found, parameters = _collectives({"axes": {"shard": 2}, "memory": memory})
    assert found["all_gather_into_tensor"] == gathers(parameters)
    assert found["reduce_scatter_tensor"] == scatters * parameters


def test_copies_of_a_shard_are_summed_once_a_step() -> None:
    found, parameters = _collectives({"axes": {"replicate": 2, "shard": 2}})
    assert found["reduce_scatter_tensor"] == MICRO * parameters
    assert found["all_reduce"] == parameters
