"""Which inputs a stopped run of a graph may have changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from hyper_parallel.compat.fx_graph import fake_mode_with_symbols
from hyper_parallel.graph import StepGraph, capture
from hyper_parallel.graph.accumulate import Accumulation, changed_input


def _step(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> StepGraph:
    with fake_mode_with_symbols():
        x, total = torch.empty(4), torch.empty(4)
        given: Any = {"x": ("buffer", x), "total": ("input", total)}
        return capture(lambda: {"y": function(x, total)}, given)


def _nodes(step: StepGraph, name: str) -> set[fx.Node]:
    return {node for node in step.nodes if name in str(node.target)}


def _loop(step: StepGraph, *totals: str) -> Accumulation:
    values = {one.name: node.meta["value"] for one, node in zip(step.inputs, step.placeholders, strict=True)}
    return Accumulation(step, {name: values[name] for name in totals}, {}, {}, frozenset())


def test_what_is_written_behind_a_stop_is_as_it_was() -> None:
    step = _step(lambda x, total: x.add_(x.exp().sin()))
    assert changed_input(step, _nodes(step, "sin")) is None
    assert changed_input(step, set()) is None


def test_what_is_written_before_a_stop_or_in_it_is_named() -> None:
    step = _step(lambda x, total: x.add_(1.0).exp())
    assert changed_input(step, _nodes(step, "exp")) == "x"
    assert changed_input(step, _nodes(step, "add_")) == "x"


def test_a_write_through_a_view_is_one() -> None:
    step = _step(lambda x, total: (x[:2].add_(1.0), total.exp())[1])
    assert changed_input(step, _nodes(step, "exp")) == "x"


def test_what_the_step_made_itself_is_no_input() -> None:
    step = _step(lambda x, total: x.cos().add_(1.0).exp())
    assert changed_input(step, _nodes(step, "exp")) is None


@pytest.mark.parametrize(
    ("when", "expected"), [({}, "x"), ({"add_": "last"}, None), ({"sin": "first"}, None)], ids=str
)
def test_in_a_loop_the_end_of_a_micro_batch_is_before_the_next(
    when: dict[str, str], expected: str | None
) -> None:
    step = _step(lambda x, total: x.add_(x.exp().sin()))
    for name, value in when.items():
        for node in _nodes(step, name):
            node.meta["when"] = value
    assert changed_input(step, _nodes(step, "sin"), _loop(step)) == expected


def test_totals_of_a_loop_begin_anew() -> None:
    step = _step(lambda x, total: total.add_(x).exp())
    assert changed_input(step, _nodes(step, "exp"), _loop(step, "total")) is None
    assert changed_input(step, _nodes(step, "exp"), _loop(step)) == "total"
