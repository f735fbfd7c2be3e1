"""Costs of stages are those of their nodes, and saved bytes are those that a forward pass leaves behind."""

from __future__ import annotations

import functools

import pytest
from torch import Tensor, fx, nn

from harness.families import FAMILIES
from harness.pipelines import Captured, captured_module
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.partition import label
from hyper_parallel.graph.stage_cut import balanced_counts, flops_cost, layer_stages
from hyper_parallel.graph.stage_graph import Partition, partition
from hyper_parallel.runtime.stage_costs import parts_of, stage_costs

VALUE = 3 * 6 * 4
"""Bytes of one activation of the small models."""


class Chain(nn.Module):
    """Linear layers with tanh between them."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Towers(nn.Module):
    """An encoder whose result every layer of the decoder uses."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.decoder = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        seen = x
        for block in self.encoder:
            seen = block(seen)
        for block in self.decoder:
            x = block(x) + seen
        out: Tensor = self.head(x)
        return out


@functools.cache
def _llama() -> StepGraph:
    return Captured({**FAMILIES["llama"], "num_hidden_layers": 4}).step


def _cut(step: StepGraph, counts: tuple[int, ...], layers: str = "model.layers") -> Partition:
    return partition(step, layer_stages(layers, counts, step), len(counts))


def _products(node: fx.Node) -> float:
    return float("mm" in str(node.target))


def test_a_middle_stage_saves_its_input_and_what_its_activation_gave() -> None:
    found = stage_costs(_cut(captured_module(Chain(), (3, 6)), (1, 1, 1, 1), "blocks"), _products)
    # The input is for the gradient of the weight, the result of tanh for its own gradient. The weight's half needs the
    # input and the gradient of the product.
    assert found.saved[1:3] == (2 * VALUE, 2 * VALUE)
    assert found.released[1:3] == (0.0, 0.0)
    assert found.forward == (1, 1, 1, 1)
    # The first stage has no input that needs a gradient.
    assert found.input == (0, 1, 1, 1)
    assert found.weight == (1, 1, 1, 1)
    assert found.backward == (1, 2, 2, 2)


def test_stages_of_more_layers_save_as_much_more() -> None:
    step = captured_module(Chain(6), (3, 6))
    two = stage_costs(_cut(step, (2, 2, 2), "blocks"), _products)
    # What one layer gives is what the next one is given.
    assert two.saved[1] == 3 * VALUE
    assert two.weight[1] == 2


def test_every_node_costs_in_one_stage() -> None:
    step = _llama()
    priced = flops_cost(step)
    # What the batch alone decides is computed in each stage.
    repeated = {node.name for node in label(step, lambda _: None, 1).repeated}

    def cost(node: fx.Node) -> float:
        return 0.0 if node.name in repeated else priced(node)

    whole = sum(map(cost, step.nodes))
    for counts in ((2, 2), (1, 1, 1, 1), (0, 3, 1)):
        found = stage_costs(_cut(step, counts), cost)
        assert sum(found.forward) + sum(found.backward) == pytest.approx(whole, rel=1e-6)
        assert all(w > 0 for w in found.weight)


def test_equal_layers_cost_the_same_and_the_head_more() -> None:
    step = _llama()
    found = stage_costs(_cut(step, (1, 1, 1, 1)), flops_cost(step))
    assert found.forward[1] == found.forward[2] < found.forward[3]
    assert found.saved[1] == found.saved[2] > 0


def test_transfers_are_of_the_bytes_that_cross() -> None:
    step = captured_module(Chain(), (3, 6))
    found = stage_costs(_cut(step, (2, 2), "blocks"), _products, lambda count: 0.5 + count)
    assert found.transfers == (0.5 + VALUE,)
    assert stage_costs(_cut(step, (2, 2), "blocks"), _products).transfers == (0.0,)


def test_what_goes_further_leaves_over_the_border_of_its_source() -> None:
    step = captured_module(Towers(), (3, 6))
    # The encoder's result goes to both later stages, and its gradients are added up on their way back.
    found = stage_costs(_cut(step, (2, 1, 1), "decoder"), _products, float)
    assert found.transfers == (3 * VALUE, 2 * VALUE)


def test_an_encoder_counts_in_the_first_stage() -> None:
    step = captured_module(Towers(), (3, 6))
    first, second = _cut(step, (1, 3), "decoder").stages
    names = [
        {one.name.split(".")[1] for one in stage.step.inputs if one.kind == "parameter"}
        for stage in (first, second)
    ]
    assert names == [{"encoder", "decoder"}, {"decoder", "head"}]
    # Products: 8 of the encoder, 2 + 3 + 3 + 3 of the decoder, 3 of the head; first layers have no gradient to give.
    assert balanced_counts(step, "decoder", 2, _products) == (1, 3)
    assert balanced_counts(step, "decoder", 3, _products) == (0, 3, 1)


def test_nothing_is_lost_between_the_parts() -> None:
    for stage in _cut(_llama(), (2, 2)).stages:
        parts = parts_of(stage)
        assert [node for part in parts for node in part] == list(stage.step.nodes)
        assert all(parts)
