"""Recomputation on a small Llama: what it saves, what it leaves alone, and that the bits stay."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import fx

from harness.captured import family_config, inputs_of, micro_batches, recipe_of, shape_of
from harness.equivalence import draw_batch
from harness.families import FAMILIES
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.errors import GraphError
from hyper_parallel.graph import (
    StepGraph,
    executable,
    is_collective,
    is_wait,
    layers,
    lifetimes,
    peak,
    recompute,
    regather,
    validate,
    values_of,
    workspaces,
)
from hyper_parallel.graph.graph_writer import moved_meta
from hyper_parallel.graph.ir import Value
from hyper_parallel.graph.memory_effects import begun
from hyper_parallel.graph.operator_costs import is_expensive, operator_name
from hyper_parallel.overlap.buckets import Buckets
from hyper_parallel.step.capture_train_step import capture_step
from hyper_parallel.step.recipe import CONTROL_VECTOR

LAYERS = ("model.layers.0", "model.layers.1")
SETTINGS: dict[str, Mapping[str, Any]] = {
    **FAMILIES,
    "deep": {**FAMILIES["llama"], "num_hidden_layers": 3},
}


def _captured(family: str = "llama", **strategy: object) -> StepGraph:
    """The step of a family, which is captured once."""
    return _captured_once(family, repr(strategy))


@functools.cache
def _captured_once(name: str, written: str) -> StepGraph:
    family, strategy = SETTINGS[name], ast.literal_eval(written)
    config = family_config(family, strategy, None)
    world = config.strategy.axes.world
    with fake_ranks(world, 0):
        recipe = recipe_of(family, config)
        micro = micro_batches(recipe.handle, config, draw_batch(family))
        return capture_step(recipe, shape_of(micro, True))


@functools.cache
def _updated(step: StepGraph, name: str = "llama") -> dict[str, torch.Tensor]:
    """The state after one step on one device, from the same values each time."""
    family = SETTINGS[name]
    config = family_config(family, {}, None)
    recipe = recipe_of(family, config)
    tensors = inputs_of(recipe, micro_batches(recipe.handle, config, draw_batch(family)), 100.0)
    executable(step).run(
        tensors, lambda point, values: torch.zeros(CONTROL_VECTOR) if point == "load" else None
    )
    return tensors


def _kept(step: StepGraph) -> int:
    """Bytes of the layers' activations that live from the forward into the backward pass."""
    found = (life for life in lifetimes(step) if life.kind == "activation")
    return sum(life.bytes for life in found if life.module.startswith(LAYERS))


def test_layers_computed_again_leave_the_same_bits_and_less_alive() -> None:
    step = _captured()
    small = layers(step, LAYERS)
    validate(step, small)
    assert _kept(small) < _kept(step) / 4
    assert peak(small).bytes < peak(step).bytes
    expected, got = _updated(step), _updated(small)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_a_strategy_that_recomputes_layers_has_them_in_its_graph() -> None:
    step, asked = _captured(), _captured(memory={"recompute": "layer"})
    assert _kept(asked) == _kept(layers(step, LAYERS)) < _kept(step) / 4
    again = [node for node in asked.nodes if node.meta["recomputed"]]
    assert {node.meta["region"].phase for node in again} == {"backward"}
    expected, got = _updated(step), _updated(asked)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_each_layer_more_that_is_recomputed_lowers_the_peak_and_changes_no_bit() -> None:
    steps = [_captured("deep")]
    steps += [_captured("deep", memory={"recompute": "layer", "recompute_layers": k}) for k in (1, 2, 3)]
    peaks = [peak(step).bytes for step in steps]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(peaks)
    assert peaks[-1] == peak(_captured("deep", memory={"recompute": "layer"})).bytes
    expected = _updated(steps[0], "deep")
    for count, step in enumerate(steps):
        of = {str(node.meta["module"]).split(".")[2] for node in step.nodes if node.meta["recomputed"]}
        assert of == {str(layer) for layer in range(count)}
        got = _updated(step, "deep")
        assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_the_first_layers_have_a_lower_peak_than_the_last_ones() -> None:
    step = _captured("deep")
    first, last = (layers(step, [f"model.layers.{at}" for at in some]) for some in ((0,), (2,)))
    assert peak(first).bytes < peak(last).bytes


SPREAD = {"shard": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        *((name, {}) for name in ("llama", "gpt2", "mixtral", "deepseek-v3")),
        *((name, SPREAD) for name in ("llama", "mixtral")),
    ],
)
def test_selective_recompute_repeats_no_product_and_no_collective(name: str, axes: dict[str, int]) -> None:
    step = _captured(name, axes=axes)
    some = _captured(name, axes=axes, memory={"recompute": "selective", "recompute_layers": 1})
    every = _captured(name, axes=axes, memory={"recompute": "selective"})
    assert peak(every).bytes < peak(some).bytes < peak(step).bytes
    again = [node for node in every.nodes if node.meta["recomputed"] and node.op == "call_function"]
    assert again
    for node in again:
        shapes = [next(values_of(one)).shape for one in node.all_input_nodes]
        assert not is_collective(node) and not is_expensive(operator_name(node), shapes)
    if not axes:
        expected, got = _updated(step, name), _updated(every, name)
        assert all(torch.equal(expected[key], got[key]) for key in expected)


def test_scores_of_attention_are_cheap_for_their_size() -> None:
    assert is_expensive("mm", [(512, 64), (64, 256)])
    assert is_expensive("bmm", [(8, 512, 512), (8, 512, 64)])  # sums over the values
    assert not is_expensive("bmm", [(8, 512, 64), (8, 64, 512)])  # scores
    assert not is_expensive("baddbmm", [(8, 512, 512), (8, 512, 64), (8, 64, 512)])
    assert is_expensive("_scaled_dot_product_flash_attention_for_cpu", [])
    assert not is_expensive("silu", [(512, 64)])


def test_in_bfloat16_layers_are_computed_again_from_what_they_are_given() -> None:
    # A layer's input is cast to float32 for its norm; the cast is what the backward pass uses, and not the input.
    small = list(layers(_captured(precision={"compute": "bfloat16"}), LAYERS).nodes)
    first, second = (
        [at for at, node in enumerate(small) if node.meta["region"].phase == "backward" and _of(node, layer)]
        for layer in LAYERS
    )
    # So the first layer is not computed again before the last one's backward pass is over.
    assert sum(small[at].meta["recomputed"] for at in first) > 50
    assert min(at for at in first if small[at].meta["recomputed"]) > max(second)


def _of(node: fx.Node, layer: str) -> bool:
    return str(node.meta["module"]).startswith(layer)


def test_weights_are_gathered_again_and_live_twice_but_briefly() -> None:
    step = _captured(axes={"shard": 2})
    again = regather(step)
    validate(step, again)
    gathers = [node for node in again.nodes if is_collective(node) and "all_gather" in str(node.target)]
    repeated = [node for node in gathers if node.meta["recomputed"]]
    assert repeated and all(node.meta["region"].phase == "backward" for node in repeated)
    assert peak(again).bytes < peak(step).bytes
    turn = next(at for at, node in enumerate(again.nodes) if node.meta["region"].phase == "backward")
    through = [
        life for life in lifetimes(again) if life.kind == "parameter" and -1 < life.born < turn < life.died
    ]
    assert not through


def test_what_cannot_be_computed_again_says_why() -> None:
    step = _captured(axes={"tensor": 2})
    outside = next(storage.index for storage in step.storages if storage.name is not None)
    with pytest.raises(GraphError, match="comes from outside"):
        recompute(step, [outside])
    late = next(life for life in lifetimes(step) if life.phase == "optimizer")
    with pytest.raises(GraphError, match="not made in the forward pass"):
        recompute(step, [late.storage])
    # Collectives that gather no weights stay, unless they are asked for.
    few, more = layers(step, LAYERS), layers(step, LAYERS, collectives=True)
    count = [sum(map(is_collective, each.nodes)) for each in (step, few, more)]
    assert count[0] == count[1] < count[2]
    assert _kept(more) < _kept(few) < _kept(step)


def test_gloo_takes_what_it_gathers_and_what_it_was_sent() -> None:
    step = _captured(axes={"shard": 2})
    taken = workspaces(step)
    nodes = list(step.nodes)
    for life in taken:
        (made,) = values_of(nodes[life.born])
        gathers = "all_gather" in str(nodes[life.born].target)
        assert life.bytes == made.elements * made.dtype.itemsize * (1 if gathers else 2)
        assert is_wait(nodes[life.died]) and begun(nodes[life.died]) is nodes[life.born]
    assert len(taken) == sum(
        "all_gather" in str(n.target) or "reduce_scatter" in str(n.target) for n in nodes
    )
    assert not workspaces(_captured())


def test_what_travels_in_one_message_is_held_once_more() -> None:
    step = _captured(axes={"shard": 2})
    bucketed = Buckets()(step)
    found = {}
    for life in workspaces(bucketed):
        node = list(bucketed.nodes)[life.born]
        if "coalesced" not in str(node.target):
            continue
        part, whole = sorted((_bytes(*node.args[0]), _bytes(node)))
        gathers = "all_gather" in str(node.target)
        found[gathers] = life.bytes
        # A gather: gloo's own copy, the message, and the result before it is cut up.
        assert life.bytes == (2 * whole + part if gathers else 2 * whole)
    assert set(found) == {True, False}


def _bytes(*nodes: fx.Node) -> int:
    return sum(value.elements * value.dtype.itemsize for node in nodes for value in values_of(node))


def test_a_moved_node_writes_where_its_storages_went() -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta = {"value": Value((2,), (1,), torch.float32, torch.device("cpu"), 1), "writes": (1, 7)}
    moved = moved_meta(node, {1: 5})
    assert moved["value"].storage == 5
    assert moved["writes"] == {5, 7}
