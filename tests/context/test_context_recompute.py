"""Layers of split positions that are computed again keep what they are given, and nothing of how blocks were merged."""

from __future__ import annotations

import pytest

from harness.captured import family_config, micro_batches, recipe_of, replayed_cell, shape_of
from harness.equivalence import draw_batch
from harness.families import FAMILIES
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.graph import lifetimes
from hyper_parallel.step.capture_train_step import capture_step

FP32 = 4


@pytest.mark.parametrize(("method", "context"), [("ring", 4), ("ulysses", 4)])
def test_a_layer_that_is_computed_again_keeps_its_positions_alone(method: str, context: int) -> None:
    family = {**FAMILIES["llama"], "num_hidden_layers": 1}
    # Rows of several documents: all blocks have masks, so that queries are cut the most.
    batch = draw_batch(family)
    strategy = {
        "axes": {"context": context},
        "context": {"method": method},
        "memory": {"recompute": "layer"},
    }
    config = family_config(family, strategy, None)
    with fake_ranks(context, 0):
        recipe = recipe_of(family, config)
        micro = micro_batches(recipe.handle, config, batch)
        step = capture_step(recipe, shape_of(micro, True))
    kept = [
        life.bytes
        for life in lifetimes(step)
        if life.kind == "activation" and life.module.startswith("model.layers.")
    ]
    positions = batch["input_ids"].numel() // context
    # What the layer gives, which the last norm is given; what it was given is the embedding's.
    assert kept == [positions * family["hidden_size"] * FP32]


@pytest.mark.matrix
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_layers_that_are_computed_again_give_the_same_bits(method: str) -> None:
    strategy = {"axes": {"context": 2}, "context": {"method": method}}
    kept, again = (
        replayed_cell(FAMILIES["llama"], {**strategy, "memory": {"recompute": how}})
        for how in ("none", "layer")
    )
    # How far the loss and every gradient are from one device's.
    assert (kept.loss, kept.grad_norm, kept.parameters) == (again.loss, again.grad_norm, again.parameters)
