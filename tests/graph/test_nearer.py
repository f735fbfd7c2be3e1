"""Nodes in another order, and gradients that wait in fewer bits: the same bits, and what stands where."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import fx

from harness.captured import family_config, inputs_of, micro_batches, recipe_of, shape_of
from harness.equivalence import draw_batch
from harness.families import FAMILIES
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.graph import StepGraph, executable, is_collective, is_wait, lifetimes, validate
from hyper_parallel.graph.memory_effects import touched
from hyper_parallel.graph.operator_costs import operator_name
from hyper_parallel.graph.recompute_policies import narrow
from hyper_parallel.graph.reorder_for_memory import cluster_uses, sums_at_birth, updates_together
from hyper_parallel.step.capture_train_step import capture_step
from hyper_parallel.step.recipe import CONTROL_VECTOR

LLAMA = FAMILIES["llama"]


@cache
def _captured(compute: str = "bfloat16", shard: int = 1) -> StepGraph:
    config = family_config(LLAMA, {"precision": {"compute": compute}, "axes": {"shard": shard}}, None)
    with fake_ranks(shard, 0):
        recipe = recipe_of(LLAMA, config)
        micro = micro_batches(recipe.handle, config, draw_batch(LLAMA))
        return capture_step(recipe, shape_of(micro, True))


@pytest.mark.parametrize("backwards", [False, True])
def test_one_order_is_that_of_both_one_after_the_other(backwards: bool) -> None:
    step = _captured()
    expected = updates_together(sums_at_birth(step), backwards=backwards)
    names = [node.name for node in cluster_uses(step, backwards=backwards).nodes]
    assert names == [node.name for node in expected.nodes] != [node.name for node in step.nodes]


@cache
def _updated(step: StepGraph) -> dict[str, torch.Tensor]:
    """The state after two steps on one device, from the same values each time."""
    config = family_config(LLAMA, {"precision": {"compute": "bfloat16"}}, None)
    recipe = recipe_of(LLAMA, config)
    tensors = inputs_of(recipe, micro_batches(recipe.handle, config, draw_batch(LLAMA)), 100.0)
    run = executable(step)
    for _ in range(2):
        run.run(tensors, lambda point, values: torch.zeros(CONTROL_VECTOR) if point == "load" else None)
    return tensors


def _all_of_it(step: StepGraph) -> StepGraph:
    return narrow(updates_together(sums_at_birth(step), backwards=True))


def _places(step: StepGraph, gradient: int, name: str) -> list[int]:
    """Where an operator is given (any life of) a gradient."""
    storages = {storage for storage, of in step.gradients.items() if of == step.gradients[gradient]}
    return [
        at for at, node in enumerate(step.nodes) if operator_name(node) == name and touched(node) & storages
    ]


def test_a_gradients_squares_are_summed_as_soon_as_it_is_there() -> None:
    step = _captured()
    made = sums_at_birth(step)
    validate(step, made)
    born = {
        life.storage: life.born for life in lifetimes(made) if life.kind == "gradient" and life.bytes > 1024
    }
    waits = [_places(made, gradient, "pow")[0] - at for gradient, at in born.items()]
    assert len(waits) > 10 and max(waits) < 6


@pytest.mark.parametrize("backwards", [False, True])
def test_a_gradient_is_scaled_right_before_its_update(backwards: bool) -> None:
    step = _captured()
    made = updates_together(step, backwards=backwards)
    validate(step, made)
    pairs = [(*_places(made, g, "mul"), *_places(made, g, "_fused_adamw")) for g in made.gradients]
    assert all(0 < update - scaled < 6 for scaled, update in pairs)
    order = [node.name for node in step.nodes if operator_name(node) == "_fused_adamw"]
    again = [node.name for node in made.nodes if operator_name(node) == "_fused_adamw"]
    assert again == (order[::-1] if backwards else order)


def test_a_gradient_waits_in_the_bits_of_its_product() -> None:
    step = updates_together(sums_at_birth(_captured()))
    made = narrow(step)
    validate(step, made)

    def waiting(graph: StepGraph) -> int:
        """Bytes of gradients when the norm of all is there."""
        at = next(at for at, node in enumerate(graph.nodes) if operator_name(node) == "sqrt")
        lives = (life for life in lifetimes(graph) if life.kind == "gradient")
        return sum(life.bytes for life in lives if life.born < at < life.died)

    assert 0.45 < waiting(made) / waiting(step) < 0.6


def test_what_is_computed_in_float32_is_not_narrower() -> None:
    step = sums_at_birth(_captured("float32"))
    assert [node.name for node in narrow(step).nodes] == [node.name for node in step.nodes]


@pytest.mark.parametrize("change", [sums_at_birth, updates_together, _all_of_it])
def test_the_bits_stay(change: Callable[[StepGraph], StepGraph]) -> None:
    expected, got = _updated(_captured()), _updated(change(_captured()))
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_collectives_stay_in_their_order() -> None:
    step = _captured(shard=2)
    made = _all_of_it(step)
    validate(step, made)

    def talk(graph: StepGraph) -> list[str]:
        return [node.name for node in graph.nodes if _talks(node)]

    assert talk(made) == talk(step) != []


def _talks(node: fx.Node) -> bool:
    return is_collective(node) or is_wait(node)
