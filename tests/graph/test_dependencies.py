"""The order that edges do not show: what must be found, what may move, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from hyper_parallel.compat.fx_graph import fake_mode_with_symbols
from hyper_parallel.errors import GraphError
from hyper_parallel.graph import StepGraph, capture, dependencies, executable, host, peak, reorder
from hyper_parallel.graph.host_nodes import HostPoint
from hyper_parallel.graph.memory_effects import is_view


def _writes_through_views() -> StepGraph:
    """A view made early, a write through another one, a read of the first."""
    with fake_mode_with_symbols():
        x = torch.empty(4, 4)

        def step() -> dict[str, torch.Tensor]:
            y = x + 1
            row, flat = y[1], y.view(16)
            before = row * 2
            flat.mul_(3)
            return {"before": before, "after": row + 0}

        return capture(step, {"x": ("input", x)})


def _named(step: StepGraph, operator: str) -> list[fx.Node]:
    return [node for node in step.nodes if str(node.target).startswith(operator)]


def test_reads_and_writes_of_one_storage_are_ordered_through_views() -> None:
    step = _writes_through_views()
    needs = dependencies(step)
    (write,) = _named(step, "aten.mul_.")
    (read_before,) = _named(step, "aten.mul.Tensor")
    read_after = _named(step, "aten.add.Tensor")[1]
    assert read_before in needs[write]  # write after read
    assert write in needs[read_after]  # read after write
    assert write not in read_after.all_input_nodes


def test_what_is_out_of_order_is_refused_and_says_why() -> None:
    step = _writes_through_views()
    (write,) = _named(step, "aten.mul_.")
    (read,) = _named(step, "aten.mul.Tensor")
    order = list(step.nodes)
    at, to = order.index(write), order.index(read)
    order[at], order[to] = order[to], order[at]
    with pytest.raises(GraphError, match="writes what that one still reads"):
        reorder(step, order)
    with pytest.raises(GraphError, match="give each computing node"):
        reorder(step, order[1:])


def test_a_view_may_move_past_a_write_and_the_result_is_the_same() -> None:
    step = _writes_through_views()
    order = list(step.nodes)
    flat = next(node for node in order if node.target is torch.ops.aten.view.default)
    assert is_view(flat)
    order.insert(0, order.pop(order.index(_named(step, "aten.add.Tensor")[0])))
    order.insert(1, order.pop(order.index(flat)))
    x = torch.randn(4, 4)
    expected, got = executable(step).run({"x": x}), executable(reorder(step, order)).run({"x": x})
    assert all(torch.equal(expected[key], got[key]) for key in expected)
    assert [node.name for node in reorder(step, order).nodes] == [node.name for node in order]


def test_nothing_that_lasts_is_written_before_the_host_has_looked() -> None:
    with fake_mode_with_symbols():
        state, x = torch.empty(3), torch.empty(3)

        def body() -> dict[str, torch.Tensor]:
            state.add_(1)
            host(HostPoint.CHECK, [x.sum()])
            made = x * 2
            made.add_(1)
            state.mul_(made)
            return {}

        step = capture(body, {"state": ("parameter", state), "x": ("input", x)})
    needs = dependencies(step)
    (point,) = [node for node in step.nodes if "host" in str(node.target)]
    (before, own), (after,) = _named(step, "aten.add_."), _named(step, "aten.mul_.")
    assert before in needs[point]
    assert point in needs[after]
    assert point not in needs[own]


def test_collectives_of_a_group_keep_their_order_and_hold_what_they_read() -> None:
    ops = torch.ops._c10d_functional
    with fake_mode_with_symbols():
        x, y = torch.empty(4), torch.empty(4)

        def body() -> dict[str, torch.Tensor]:
            copy = x + 0
            first = ops.all_gather_into_tensor(copy, 2, "0")
            second = ops.all_gather_into_tensor(y, 2, "0")
            other = ops.all_reduce(y, "sum", "1")
            gathered = ops.wait_tensor(first)
            copy.add_(1)
            return {"z": gathered + ops.wait_tensor(second), "other": ops.wait_tensor(other), "copy": copy}

        step = capture(body, {"x": ("input", x), "y": ("input", y)})
    needs = dependencies(step)
    first, second = _named(step, "_c10d_functional.all_gather")
    (other,) = _named(step, "_c10d_functional.all_reduce")
    waits = _named(step, "_c10d_functional.wait")
    (write,) = _named(step, "aten.add_.")
    assert first in needs[second]
    assert first not in needs[other] and second not in needs[other]
    assert waits[0] in needs[write]
    # What was waited for is the memory that the collective wrote: counted once.
    assert peak(step).bytes == (4 + 4 + 4 + 8 + 8 + 8 + 4) * 4
