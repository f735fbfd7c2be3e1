"""Every collective of a captured step tells its axis and its ranks."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hyper_parallel as hp
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.config.train import AdamWConfig, ScheduleConfig
from hyper_parallel.errors import CaptureError
from hyper_parallel.graph import StepGraph, group_of, is_collective, is_wait
from hyper_parallel.step.capture_train_step import BatchShape, capture_step
from hyper_parallel.step.lr_schedule import schedule
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.step.recipe import Recipe
from hyper_parallel.strategy import Strategy

MODEL = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def _captured(rank: int, world: int, **strategy: object) -> StepGraph:
    with fake_ranks(world, rank):
        with torch.device("meta"):
            model = LlamaForCausalLM(MODEL)
        hp.parallelize(model, Strategy.model_validate(strategy), lowering="traceable")
        optimizer = build_optimizer(model, AdamWConfig())
        recipe = Recipe(model, hp.sharded(model), optimizer, schedule(ScheduleConfig(), 10), clip=1.0)
        return capture_step(recipe, BatchShape(((2, 16),), (False,)))


def test_each_collective_has_an_axis_and_ranks_of_which_this_one_is_one() -> None:
    step = _captured(5, 8, axes={"replicate": 2, "shard": 2, "tensor": 2})
    found = {group_of(step, node) for node in step.nodes if is_collective(node) or is_wait(node)}
    assert {(group.axis, group.ranks) for group in found} == {
        ("replicate", (1, 5)),
        ("shard", (5, 7)),
        ("tensor_x", (4, 5)),
        ("replicate*shard*tensor_x", tuple(range(8))),
    }


def test_the_copy_of_a_step_keeps_its_groups() -> None:
    step = _captured(0, 2, axes={"shard": 2}).copy()
    assert {group_of(step, node).ranks for node in step.nodes if is_collective(node)} == {(0, 1)}


def test_the_groups_of_link_levels_are_of_their_axis() -> None:
    placement = {"network": ["shard"], "devices": {"node": 2}}
    step = _captured(0, 4, axes={"shard": 4}, placement=placement)
    found = {group_of(step, node) for node in step.nodes if is_collective(node)}
    assert {(group.axis, group.ranks) for group in found} >= {("shard", (0, 1)), ("shard", (0, 2))}


def test_a_group_that_nobody_told_of_is_named() -> None:
    step = _captured(0, 2, axes={"shard": 2})
    step.groups = {}
    node = next(node for node in step.nodes if is_collective(node))
    with pytest.raises(CaptureError, match="of which the capture was not told"):
        group_of(step, node)
