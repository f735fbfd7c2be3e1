"""Updates on the host: the same bits as on the device, nothing updated before the step is checked, state that rests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import fx

from harness.apart import placed
from harness.check_moves import check_moves
from harness.family_steps import Running, captured_step
from harness.slots import Poisoning, Shelf
from hyper_parallel.cluster import Cluster
from hyper_parallel.compat import backend
from hyper_parallel.errors import BudgetError, GraphError
from hyper_parallel.graph import (
    Slot,
    StepGraph,
    dependencies,
    ir,
    lifetimes,
    lower,
    validate,
    values_of,
    workspaces,
)
from hyper_parallel.graph.host_nodes import (
    HOST,
    calls_of,
    host_arguments_of,
    is_update,
    slots_of,
    storages_of,
)
from hyper_parallel.graph.liveness import peak_of
from hyper_parallel.graph.memory_effects import touched
from hyper_parallel.graph.step_context import Region
from hyper_parallel.offloading.runtime import Runtime
from hyper_parallel.offloading.schedule.build_problem import build_problem
from hyper_parallel.offloading.schedule.host_update_pass import can_run_on_host, latest, move_to_host
from hyper_parallel.offloading.schedule.offload_pass import apply
from hyper_parallel.offloading.schedule.problem import OffloadTier, Rate
from hyper_parallel.offloading.schedule.solve import choose
from hyper_parallel.offloading.tiers import HostTier
from hyper_parallel.simulator import simulate

STEPS = 4


@functools.cache
def _captured(family: str) -> StepGraph:
    return captured_step(family)


@functools.cache
def _apart(family: str) -> StepGraph:
    """Every update on the host."""
    step = _captured(family)
    return placed(move_to_host(step, [one.parameter for one in can_run_on_host(step)], "host"))


@functools.cache
def _expected(family: str) -> dict[str, torch.Tensor]:
    """What `STEPS` steps come to with every update on the device."""
    return Running(family, _captured(family)).after(STEPS)


def _tier(step: StepGraph) -> HostTier:
    tier = HostTier(backend("cpu"), 2**30)
    tier.reserve({number: slot.bytes for number, slot in step.slots.items()})
    return tier


@pytest.mark.parametrize("family", ["llama", pytest.param("mixtral", marks=pytest.mark.matrix)])
def test_steps_are_equal_to_the_bit(family: str) -> None:
    moved = _apart(family)
    with _tier(moved) as tier:
        got = Running(family, moved, Runtime(moved, {"host": tier})).after(STEPS)
    for name, value in _expected(family).items():
        assert torch.equal(value, got[name]), name


def test_nothing_on_the_device_is_read_that_is_away() -> None:
    moved = _apart("llama")
    got = Running("llama", moved, Poisoning(moved, {"host": Shelf.of(moved)})).after(STEPS)
    assert all(torch.equal(value, got[name]) for name, value in _expected("llama").items())


def _given_leaves(moved: StepGraph) -> StepGraph:
    """The step with what its updates are given away from the device right behind the last update."""
    made = moved.copy()
    nodes = list(made.nodes)
    updates = [node for node in nodes if is_update(node)]
    given = {
        value.storage: source
        for node in updates
        for source in host_arguments_of(node)
        for value in values_of(source)
    }
    for storage, source in given.items():
        slot, last = len(made.slots), updates[-1].next
        count = made.storages[storage].bytes
        made.slots = {**made.slots, slot: Slot(storage, "host", count, "step", 0, len(nodes))}
        for operator in (ir.store, ir.wait, ir.detach):
            with made.graph.inserting_before(last):
                node = made.graph.call_function(operator, (source, slot, "host"))
            node.meta = {"region": Region("", None, "optimizer"), "module": "", "recomputed": False}
    assert given
    validate(moved, made)
    return made


def test_what_an_update_is_given_may_be_gone_when_the_host_comes_to_it() -> None:
    moved = _given_leaves(_apart("llama"))
    # The host works at the last moment: in the next step, or when the state is looked at.
    got = Running("llama", moved, Poisoning(moved, {"host": Shelf.of(moved)})).after(STEPS)
    assert all(torch.equal(value, got[name]) for name, value in _expected("llama").items())


def test_what_an_update_is_given_must_be_there_when_it_begins() -> None:
    moved = _given_leaves(_apart("llama"))
    update = next(node for node in moved.nodes if is_update(node))
    (storage,) = {value.storage for value in values_of(host_arguments_of(update)[0])}
    for node in [node for node in moved.nodes if ir.is_cache(node) and storage in touched(node)]:
        update.prepend(node)
    with pytest.raises(GraphError, match=f"needs storage {storage}, which holds no memory"):
        validate(_apart("llama"), moved)


def test_all_of_a_dense_model_can_be_apart_and_its_state_is_never_on_the_device() -> None:
    step, moved = _captured("llama"), _apart("llama")
    updates = [node for node in moved.nodes if is_update(node)]
    assert len(updates) == sum(entry.kind == "parameter" for entry in step.inputs)
    state_storages = {storage for node in updates for storage in storages_of(node)[2:]}
    assert not {life.storage for life in lifetimes(moved)} & state_storages
    assert not [node for node in moved.nodes if "_fused_adamw" in str(node.target)]
    # Clipping, the count of updates and the update itself.
    assert {len(calls_of(node)) for node in updates} == {3}


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_planner_finds_their_moves_within_any_budget(share: float) -> None:
    step = _captured("llama")
    apart = move_to_host(step, latest(step, 0.5, 2**30), "host")
    slow = Rate(1e-6, 1.5e9)
    problem = build_problem(apart, Cluster.named("h100"), 0, (OffloadTier("host", 2**30, slow, slow),))
    budget = int(problem.working_set + share * (max(problem.profile()) - problem.working_set))
    problem = replace(problem, budget=budget)
    plan = choose(problem, tries=1)
    check_moves(problem, plan.moves)
    moved = apply(apart, problem, plan.moves)
    held = peak_of([*lifetimes(moved), *workspaces(moved)]).bytes
    assert held == max(problem.profile(plan.moves)) == plan.peak <= budget
    with _tier(moved) as tier:
        got = Running("llama", moved, Runtime(moved, {"host": tier})).after(STEPS)
    assert all(torch.equal(value, got[name]) for name, value in _expected("llama").items())


def test_what_comes_back_waits_for_the_host() -> None:
    step = _captured("llama")
    apart = move_to_host(step, latest(step, 1.0, 2**30), "host")
    quick = Rate(0.0, 1e15)
    seconds = []
    for work in (1e15, 1e6):
        problem = build_problem(
            apart, Cluster.named("h100"), 2**30, (OffloadTier("host", 2**30, quick, quick, work),)
        )
        host = sum(update.seconds for update in problem.updates)
        plan = choose(problem)
        seconds.append(plan.seconds)
        assert plan.seconds >= host
    assert seconds[0] == pytest.approx(problem.starts[-1], rel=1e-3)


@pytest.mark.parametrize("share", [0.1, 0.6])
def test_a_step_waits_for_its_updates_on_the_host(share: float) -> None:
    step = _captured("llama")
    apart = move_to_host(step, latest(step, 1.0, 2**30), "host")
    slow = Rate(1e-6, 1.5e9)
    problem = build_problem(apart, Cluster.named("h100"), 0, (OffloadTier("host", 2**30, slow, slow, 1e9),))
    budget = int(problem.working_set + share * (max(problem.profile()) - problem.working_set))
    problem = replace(problem, budget=budget)
    host = sum(update.seconds for update in problem.updates)
    assert max(host, problem.starts[-1]) <= choose(problem, tries=1).seconds


def test_rules_that_moves_of_updates_obey() -> None:
    step = _captured("llama")
    apart = move_to_host(step, [can_run_on_host(step)[0].parameter], "host")
    rate = Rate(1e-6, 1e9)
    problem = build_problem(apart, Cluster.named("h100"), 2**30, (OffloadTier("host", 2**30, rate, rate),))
    moves = choose(problem).moves
    check_moves(problem, moves)
    (update,) = problem.updates
    gradient, parameter = (
        next(move for move in moves if move.storage == storage)
        for storage in (update.gradient, update.parameter)
    )
    with pytest.raises(ValueError, match="has to be away"):
        check_moves(problem, [gradient])
    with pytest.raises(ValueError, match="before the host's update"):
        check_moves(problem, [replace(gradient, leave=update.place + 1), parameter])
    with pytest.raises(ValueError, match="fetched behind it"):
        check_moves(problem, [gradient, replace(parameter, fetch=update.place)])
    with pytest.raises(BudgetError, match="updates of 1 parameter are"):
        choose(replace(problem, spaces=(OffloadTier("host", 4096, rate, rate),)))


def test_a_step_that_is_stopped_updates_nothing() -> None:
    moved = _apart("llama")
    with _tier(moved) as tier:
        run = Running("llama", moved, Runtime(moved, {"host": tier}))
        run.step()
        before = run.values()

        def refuse() -> None:
            raise ArithmeticError("the loss is not finite")

        with pytest.raises(ArithmeticError):
            run.step(refuse)
        after = run.values()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_what_is_lent_and_changed_goes_back_to_the_slot() -> None:
    moved, plain = _apart("llama"), Running("llama", _captured("llama"))
    changed = ["parameter.model.norm.weight", "optimizer.exp_avg.model.norm.weight"]
    with _tier(moved) as tier:
        run = Running("llama", moved, Runtime(moved, {"host": tier}))
        run.step()
        plain.step()
        assert run.runtime is not None
        for name in changed:
            with run.runtime.present(name, run.tensors[name], changed=True):
                run.tensors[name].add_(0.5)
            plain.tensors[name].add_(0.5)
            assert run.tensors[name].untyped_storage().nbytes() == 0
        run.step()
        plain.step()
        expected, got = plain.values(), run.values()
    assert all(torch.equal(value, got[name]) for name, value in expected.items())


def test_an_update_that_fails_is_an_error_of_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = _apart("llama")

    def fails(*args: object) -> None:
        raise ArithmeticError("the host cannot add")

    with _tier(moved) as tier:
        run = Running("llama", moved, Runtime(moved, {"host": tier}))
        with monkeypatch.context() as patch:
            patch.setattr("hyper_parallel.offloading.runtime.run", fails)
            run.step()
        with pytest.raises(Exception, match="the host cannot add"):
            run.step()


def test_it_runs_beside_the_device_in_the_simulation() -> None:
    moved, cluster = _apart("llama"), Cluster.named("h100")
    timeline = simulate(lower({"all": moved}), cluster)
    end = {span.op.index: span.end for span in timeline.spans}
    updates = [span for span in timeline.spans if span.op.queue == "host"]
    assert len(updates) == sum(is_update(node) for node in moved.nodes)
    by_index = {span.op.index: span for span in timeline.spans}
    for span in updates:
        assert span.op.work is not None
        assert span.end - span.start == pytest.approx(cluster.host_seconds(span.op.work))
        stores = [other for other in span.op.after if by_index[other].op.queue == "copy:device>host"]
        assert len(stores) == 1
        assert span.start >= end[stores[0]]
    assert all(after.start >= before.end for before, after in pairwise(updates))
    least = sum(
        moved.slots[slot].bytes for node in moved.nodes if is_update(node) for slot in slots_of(node)[2:]
    )
    assert timeline.peak_in("host").bytes >= least


def _without(step: StepGraph, unwanted: Callable[[fx.Node], bool]) -> StepGraph:
    made = step.copy()
    for node in [node for node in made.nodes if unwanted(node)]:
        made.graph.erase_node(node)
    return made


def test_a_graph_that_updates_what_is_not_there_is_refused() -> None:
    step = _captured("llama")
    planned = move_to_host(step, [can_run_on_host(step)[0].parameter], "host")
    moved = placed(planned)
    update = next(node for node in moved.nodes if is_update(node))
    master, gradient, *_ = storages_of(update)

    def first(operator: object, storage: int) -> Callable[[fx.Node], bool]:
        return lambda node: node.target is operator and moved.slots[node.args[1]].storage == storage

    with pytest.raises(GraphError, match="not where storage"):
        validate(planned, _without(moved, first(ir.detach, master)))
    with pytest.raises(GraphError, match="does not hold"):
        validate(planned, _without(moved, first(ir.store, gradient)))


def test_no_update_may_begin_before_the_step_is_checked() -> None:
    moved = _apart("llama")
    check = [node for node in moved.nodes if node.target is HOST][-1]
    needs = dependencies(moved)
    assert all(check in needs[node] for node in moved.nodes if is_update(node))


def test_state_that_something_else_looks_at_stays_on_the_device() -> None:
    step = _captured("llama").copy()
    everything = len(can_run_on_host(step))
    update = next(node for node in step.nodes if "_fused_adamw" in str(node.target))
    with step.graph.inserting_before(update):
        looked = step.graph.call_function(torch.ops.aten.add_.Scalar, (update.args[2][0], 0.0))  # type: ignore[index]
    looked.meta = {**update.meta, "value": update.args[2][0].meta["value"]}  # type: ignore[index,union-attr]
    assert len(can_run_on_host(step)) == everything - 1
