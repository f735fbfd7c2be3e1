"""Kinds of layers, the period in which they follow each other, and runs of nodes that do the same."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from torch import nn

from hyper_parallel.compat.fx_graph import fake_mode_with_symbols
from hyper_parallel.graph import capture, phase
from hyper_parallel.graph.likeness import (
    Period,
    find_period,
    kinds,
    likeness,
    signature,
)
from hyper_parallel.graph.step_context import region_of


class _Layer(nn.Module):
    def __init__(self, index: int, width: int = 4, window: int | None = None, shown: bool = True) -> None:
        super().__init__()
        self.index, self.window = index, window
        if shown:
            self.place = index
        self.linear = nn.Linear(4, width)


def test_layers_are_of_one_kind_but_for_their_own_index() -> None:
    layers = [_Layer(i, window=8 if i % 2 else None) for i in range(6)]
    assert kinds(layers) == [[0, 2, 4], [1, 3, 5]]
    assert kinds(layers, lambda index: {"placed": str(index == 4)}) == [[0, 2], [1, 3, 5], [4]]
    assert kinds([_Layer(0), _Layer(1, width=8), _Layer(2)]) == [[0, 2], [1]]
    frozen = [_Layer(i) for i in range(3)]
    frozen[1].requires_grad_(False)
    assert kinds(frozen) == [[0, 2], [1]]
    # A number that is the index of some layers only is a setting.
    assert kinds([_Layer(0), _Layer(1), _Layer(7)]) == [[0], [1], [2]]
    assert kinds([]) == []


def test_a_signature_tells_settings_and_shapes_and_no_values() -> None:
    one, other = _Layer(0), _Layer(0)
    assert signature(one) == signature(other)
    assert len({signature(layer) for layer in (one, _Layer(0, width=8), _Layer(0, window=2), _Layer(1))}) == 4


def _scaled(factor: float) -> nn.Module:
    layer = _Layer(0)
    layer.between = lambda x: x * factor  # type: ignore[assignment]
    return layer


def test_a_function_is_told_by_its_code_and_what_it_closes_over() -> None:
    shifted = _Layer(0)
    shifted.between = lambda x: x + 2.0  # type: ignore[assignment]
    found = [signature(one) for one in (_scaled(2.0), _scaled(2.0), _scaled(3.0), shifted)]
    assert found[0] == found[1]
    assert len(set(found)) == 3
    takes = [lambda x: x, lambda *x: x, lambda x, y=None: x, lambda x, *, y=None: x]
    layers = [_Layer(0) for _ in takes]
    for layer, one in zip(layers, takes, strict=True):
        layer.between = one  # type: ignore[assignment]
    assert len({signature(layer) for layer in layers}) == len(takes)


def _period(found: list[list[int]]) -> Period | None:
    return find_period(found, 5)


def test_layers_are_captured_by_their_period() -> None:
    assert _period([list(range(80))]).layers == [0, 1, 2, 78, 79]  # type: ignore[union-attr]
    alternate = _period([list(range(0, 26, 2)), list(range(1, 26, 2))])
    assert alternate == Period(26, 0, 2, 13, 5)
    assert alternate.layers == [0, 1, 2, 3, 4, 5, 22, 23, 24, 25]
    assert [alternate.block(at) for at in (0, 3, 4, 9, 10)] == [0, 1, 2, 4, None]
    assert [alternate.real(at, 1) for at in (3, 4, 5, 6)] == [3, 6, 7, 22]
    dense_first = _period([[0, 1, 2], list(range(3, 61))])
    assert dense_first is not None
    assert dense_first.layers == [0, 1, 2, 3, 4, 5, 59, 60]
    assert [replace(dense_first, captured=count).layers for count in (3, 4)] == [
        [0, 1, 2, 3, 4, 60],
        [0, 1, 2, 3, 4, 5, 60],
    ]
    assert _period([[0, 1, 2, 3, 4]]) is None
    assert _period([]) is None


@pytest.mark.parametrize("captured", [2, 3, 4, 5])
def test_captured_layers_and_copies_of_the_middle_are_the_model(captured: int) -> None:
    period = find_period([[0, 20], [*range(1, 19, 2)], [*range(2, 19, 2)], [19]], captured)
    assert period is not None
    assert (period.before, period.length, period.behind) == (1, 2, 19)
    found = []
    for place, layer in enumerate(period.layers):
        copies = period.copies if period.block(place) == period.middle else 1
        if copies == 1:
            assert period.real(place, 0) == layer
        found += [period.real(place, copy) for copy in range(copies)]
    assert sorted(found) == list(range(21))


class _Model(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, width), nn.GELU(), nn.Linear(width, 4)) for width in widths
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_alike_layers_are_alike_as_nodes_in_each_pass() -> None:
    with fake_mode_with_symbols():
        model, x = _Model(8, 8, 8, 16, 8), torch.empty(2, 4)

        def step() -> dict[str, torch.Tensor]:
            loss = model(x).sum()
            with phase("backward"):
                found = torch.autograd.grad(loss, list(model.parameters()))
            return {str(at): gradient for at, gradient in enumerate(found)}

        graph = capture(
            step, {**{n: ("parameter", p) for n, p in model.named_parameters()}, "x": ("input", x)}, model
        )
    runs = defaultdict(list)
    for node in graph.nodes:
        if region_of(node).layer:
            runs[region_of(node)].append(node)
    seen: dict[str, list[object]] = defaultdict(list)
    for region, nodes in runs.items():
        seen[region.phase].append(likeness(nodes))
    forward, backward = seen["forward"], seen["backward"][::-1]
    assert len(forward) == len(backward) == 5
    assert forward[0] == forward[1] == forward[2] == forward[4] != forward[3]
    # The first layer gives no gradient to what is before it, and the last one begins the pass.
    assert backward[1] == backward[2] != backward[3]


def test_numbers_types_and_shared_storages_tell_nodes_apart() -> None:
    with fake_mode_with_symbols():
        x = torch.empty(4)
        made = capture(
            lambda: {"a": x * 1, "b": x * 1.0, "c": x * x, "d": x * torch.empty(4), "e": x * 1},
            {"x": ("input", x)},
        )
    products = [likeness((node,)) for node in made.nodes if node.target is torch.ops.aten.mul.Tensor]
    assert len(products) == 5
    assert len(set(products)) == 4
    assert products[0] == products[4]
