"""Steps of several micro-batches from the captured step of one: as a loop, and written out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from hyper_parallel.compat.fake_tensors import fake_mode
from hyper_parallel.errors import GraphError
from hyper_parallel.graph import StepGraph, capture, executable, lifetimes, phase
from hyper_parallel.graph.accumulate import Accumulation, accumulation, loop_executable, when_of
from hyper_parallel.graph.expand import expanded, unrolled
from hyper_parallel.graph.ir import GivenTensor
from hyper_parallel.graph.step_context import micro_batch, region_of

WEIGHT = torch.tensor([2.0, 3.0, 5.0])


def _step(*, peeks: bool = False, shares: bool = False) -> StepGraph:
    """Adds the sum of a batch times a doubled weight to a state; with `peeks` also the batch's largest element, once a
    step; with `shares` what is summed lies in memory that something else is in too."""
    with fake_mode():
        x, weight, state = torch.empty(3), torch.empty(3), torch.empty(())

        def body() -> dict[str, Tensor]:
            with micro_batch(0):
                double = weight * 2.0
                product = x * double
                found = product.sum()
                if shares:
                    # The whole has nine elements, of which one is summed.
                    found = (product.expand(3, 3) * product.sum()).sum(0)[:1].view([])
            with phase("optimizer"):
                state.add_(found.view_as(found))
                if peeks:
                    state.add_(x.amax())
            return {"loss": found, "double": double}

        given = {"x": x, "weight": weight, "state": state}
        return capture(body, {name: GivenTensor("input", one) for name, one in given.items()})


def _loop(step: StepGraph) -> Accumulation:
    returned = step.returned
    loss = returned["loss"]
    while loss.target is torch.ops.aten.view.default:
        loss = loss.all_input_nodes[0]
    return accumulation(step, {"double": returned["double"]}, {"loss": loss}, {"x"})


def _numbered(name: str, number: int) -> str:
    return f"{name}.{number}"


def _run_loop(loop: Accumulation, batches: list[Tensor], state: Tensor) -> None:
    loop_executable(loop).run({"weight": WEIGHT, "state": state}, [{"x": batch} for batch in batches])


def _run_pairs(loop: Accumulation, batches: list[Tensor], state: Tensor) -> None:
    pairs = [
        {f"x.{at}": batch for at, batch in enumerate(batches[n : n + 2])} for n in range(0, len(batches), 2)
    ]
    pair = unrolled(loop, 2, _numbered)
    assert pair.width == 2 and set(pair.totals) <= {entry.name for entry in pair.body.inputs}
    loop_executable(pair).run({"weight": WEIGHT, "state": state}, pairs)


def _run_expanded(loop: Accumulation, batches: list[Tensor], state: Tensor) -> None:
    given: Mapping[str, Tensor] = {f"x.{at}": batch for at, batch in enumerate(batches)}
    executable(expanded([loop] * len(batches), _numbered)).run({"weight": WEIGHT, "state": state, **given})


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("shares", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("run", [_run_loop, _run_expanded])
def test_what_runs_once_a_step_sees_the_sum_of_its_micro_batches(
    run: Callable[[Accumulation, list[Tensor], Tensor], None], shares: bool, count: int
) -> None:
    loop = _loop(_step(shares=shares))
    state = torch.zeros(())
    batches = [torch.tensor([float(at), 1.0, 2.0]) for at in range(count)]
    products = [2.0 * WEIGHT * batch for batch in batches]
    expected = [3 * one[0] * one.sum() if shares else one.sum() for one in products]
    for _ in range(2):
        run(loop, batches, state)
    assert state == 2 * torch.stack(expected).sum()


@pytest.mark.parametrize("count", [2, 4, 6])
@pytest.mark.parametrize("shares", [False, True], ids=["own", "shared"])
def test_a_body_of_two_micro_batches_computes_the_same(shares: bool, count: int) -> None:
    batches = [torch.tensor([float(at), 1.0, 2.0]) for at in range(count)]
    found = []
    for run in (_run_loop, _run_pairs):
        found.append(torch.zeros(()))
        run(_loop(_step(shares=shares)), batches, found[-1])
    assert found[0] == found[1] != 0
    # Written out, it is the step of all micro-batches.
    pair = unrolled(_loop(_step(shares=shares)), 2, _numbered)
    step = expanded([pair] * (count // 2), lambda name, n: f"x.{2 * n + int(name[2:])}")
    state = torch.zeros(())
    executable(step).run(
        {"weight": WEIGHT, "state": state, **{f"x.{n}": one for n, one in enumerate(batches)}}
    )
    assert state == found[0]
    assert {region_of(node).micro_batch for node in step.nodes} == {None, *range(count)}


def test_each_pass_has_its_own_values_and_weights_are_gathered_once() -> None:
    loop = _loop(_step())
    double = loop.weights["double"]
    assert when_of(double) == "first"
    step = expanded([loop] * 4, _numbered)
    products = [node for node in step.nodes if node.target is torch.ops.aten.mul.Tensor]
    assert [region_of(node).micro_batch for node in products] == [0, 0, 1, 2, 3]
    assert len({node.meta["value"].storage for node in products}) == 5
    assert [entry.name for entry in step.inputs] == ["x.0", "x.1", "x.2", "x.3", "weight", "state"]
    # The first micro-batch's sum is the total.
    sums = [node for node in step.nodes if node.target is torch.ops.aten.add_.Tensor]
    assert [len(node.all_input_nodes) for node in sums] == [2, 2, 2, 2]
    (total,) = {node.meta["value"].storage for node in sums[:3]}
    assert next(life.born for life in lifetimes(step) if life.storage == total) == 2


def test_what_runs_once_a_step_may_not_use_one_micro_batch_alone() -> None:
    with pytest.raises(GraphError, match=r"amax.*uses values of one micro-batch"):
        _loop(_step(peeks=True))


def test_micro_batches_of_other_weights_are_refused() -> None:
    one, other = _loop(_step()), _step()
    unlike = accumulation(other, {}, {"loss": other.returned["loss"]}, {"x"})
    other_weights = Accumulation(
        unlike.body, unlike.totals, unlike.added, {"triple": next(unlike.body.nodes)}, unlike.batch
    )
    with pytest.raises(GraphError, match="triple in one is not there in another"):
        expanded([one, other_weights], _numbered)
