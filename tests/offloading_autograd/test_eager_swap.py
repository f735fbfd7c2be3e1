"""The budget of passes whose activations are away: the formula on a small problem, and a model within it."""

from __future__ import annotations

from typing import Any

from tiny import batch_of, model_of, same, trained

import hyper_parallel as hp
from hyper_parallel.offloading.autograd import Swap
from hyper_parallel.offloading.autograd.budget import with_resident_inputs
from hyper_parallel.offloading.schedule.problem import Buffer, Problem, UseInterval

BATCHES = [batch_of(rows=8, seed=step) for step in range(3)]


def _held(storage: int, count: int, kind: str, name: str, *busy: tuple[int, int]) -> Buffer:
    return Buffer(
        storage,
        count,
        kind,
        tuple(UseInterval(*one, writes=False) for one in busy),
        kind == "parameter",
        name=name,
    )


def test_what_no_node_uses_is_away_and_two_layers_are_on_their_way() -> None:
    problem = Problem(
        (0.0, 1.0, 2.0, 3.0, 4.0),
        (
            _held(0, 1000, "parameter", "weight", (0, 3)),
            _held(1, 10, "activation", "layers.0.up", (0, 0), (3, 3)),
            _held(2, 20, "activation", "layers.0.down", (0, 1), (3, 3)),
            _held(3, 25, "activation", "layers.1", (1, 1), (2, 2)),
            _held(4, 500, "temporary", "layers.1", (2, 2)),
        ),
        (),
        (),
        budget=1,
    )
    step: Any = None  # of which only the inputs of layers are asked
    # At node 2: the weight, what layer 1 kept, and the temporary; layer 0 keeps most, 30.
    assert Swap(layers="layers").budget(step, problem) == 1000 + 25 + 500 + 2 * 30
    # Where layers are not known each module is one.
    assert Swap().budget(step, problem) == 1000 + 25 + 500 + 2 * 25


def test_a_model_within_what_it_needs_without_activations() -> None:
    free = trained(model_of("llama", num_hidden_layers=4), BATCHES, observed=True)
    model: Any = hp.offload(
        model_of("llama", num_hidden_layers=4), budget=Swap(layers="model.layers"), host="16MiB"
    )
    moved = trained(model, BATCHES, observed=True)
    assert same(moved, free)
    assert "go and come back" in model.forward.notes[-1]
    plans = model.forward._plans
    [[ready]] = plans._known.values()
    step = with_resident_inputs(ready.passes.step, ready.held)
    away = plans._bytes(step)
    assert moved.peaks[2] <= away < free.peaks[2]
    plans._budget = Swap(False, "model.layers")
    assert away < plans._bytes(step) < free.peaks[2]
