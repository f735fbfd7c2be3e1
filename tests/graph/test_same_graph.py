"""Graphs that differ anywhere are told apart, and so are periods of layers."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.captured import recipe_of
from harness.equivalence import family_config
from harness.families import FAMILIES
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.likeness import difference
from hyper_parallel.graph.period_pattern import Pair, Unlike
from hyper_parallel.graph.periods import assembled
from hyper_parallel.graph.step_context import region_of
from hyper_parallel.step import capture_micro_batch, capture_train_step
from hyper_parallel.step.capture_train_step import MicroBatchShape


def _captured(kept: int) -> tuple[StepGraph, Pair]:
    """A step captured with the first `kept` - 1 layers and the last, and the first and the last of these."""
    family = {**FAMILIES["llama"], "num_hidden_layers": 9}
    recipe = recipe_of(family, family_config(family, {"axes": {}}, {}))
    (plan, *_), shape = capture_micro_batch._plans(recipe.handle), MicroBatchShape(2, 32, False)
    few = plan._few(
        recipe.handle,
        lambda: capture_train_step._captured(recipe, shape, 1, "cpu"),
        plan.between[: kept - 2],
    )
    return few, plan.pair


_once = functools.cache(_captured)


def _few(kept: int) -> tuple[StepGraph, Pair]:
    """A copy of the step, which may be changed."""
    step, pair = _once(kept)
    return step.copy(), pair


def _nodes(step: StepGraph, target: Any, layer: str) -> list[Any]:
    return [n for n in step.nodes if n.target is target and region_of(n).layer == layer]


def test_two_captures_of_a_step_and_a_copy_are_the_same() -> None:
    three, _ = _captured(3)
    for other in (_once(3)[0], three.copy()):
        assert difference(three, other) is None
        assert difference(other, three) is None


def test_a_period_more_is_that_of_the_capture() -> None:
    two, three = _few(2), _few(3)[0]
    assert difference(assembled(*two, [1]), three) is None
    assert difference(assembled(*two, [2]), three) is not None
    assert difference(assembled(*two, [1, 2]), three) is not None


def _other_number(step: StepGraph) -> None:
    (node, *_) = _nodes(step, torch.ops.aten.add.Tensor, "model.layers.0")
    node.update_arg(1, 2e-6)


def _other_operand(step: StepGraph) -> None:
    *_, first, last = _nodes(step, torch.ops.aten.mm.default, "model.layers.0")
    last.update_arg(0, first.args[0])


def _other_order(step: StepGraph) -> None:
    first, second, *_ = _nodes(step, torch.ops.aten.mm.default, "model.layers.0")
    first.prepend(second)


def _other_shape(step: StepGraph) -> None:
    (node, *_) = _nodes(step, torch.ops.aten.mm.default, "model.layers.0")
    value = node.meta["value"]
    node.meta["value"] = replace(value, shape=(value.shape[0] + 1, *value.shape[1:]))


def _other_storage(step: StepGraph) -> None:
    first, second, *_ = _nodes(step, torch.ops.aten.mm.default, "model.layers.0")
    second.meta["value"] = replace(second.meta["value"], storage=first.meta["value"].storage)


def _other_region(step: StepGraph) -> None:
    (node, *_) = _nodes(step, torch.ops.aten.mm.default, "model.layers.0")
    node.meta["region"] = replace(node.meta["region"], micro_batch=3)


def _other_gradient(step: StepGraph) -> None:
    storage = next(iter(step.gradients))
    step.gradients[storage] = "another"


CHANGES = [_other_number, _other_operand, _other_order, _other_shape, _other_storage, _other_region]


@pytest.mark.parametrize("change", [*CHANGES, _other_gradient])
def test_graphs_that_differ_anywhere_are_told_apart(change: Any) -> None:
    three, other = _once(3)[0], _few(3)[0]
    change(other)
    assert difference(three, other) is not None
    assert difference(other, three) is not None


@pytest.mark.parametrize("change", CHANGES)
def test_periods_that_differ_are_refused(change: Any) -> None:
    step, pair = _few(2)
    change(step)
    with pytest.raises(Unlike):
        assembled(step, pair, [1])
