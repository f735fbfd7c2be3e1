"""Other graphs for the same step: quicker plans by replay, the same bits, the same sequence of collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from harness.family_steps import Running, captured_step, config_of
from harness.slots import Poisoning, Shelf
from hyper_parallel.cluster import Cluster
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.errors import BudgetError
from hyper_parallel.graph import StepGraph, is_collective, is_wait
from hyper_parallel.offloading import OffloadTier, Plan, Problem, Rate
from hyper_parallel.offloading.schedule import graph_search
from hyper_parallel.offloading.schedule.allowed_rewrites import Choices
from hyper_parallel.offloading.schedule.build_problem import build_problem
from hyper_parallel.offloading.schedule.offload_pass import Planned, explained, planned

CLUSTER = Cluster.named("h100")
BOTH = Choices(update="device")
NEITHER = Choices(recompute=False, order=False, update="device")
SLOW = Rate(1e-7, 5e7)


@pytest.fixture(autouse=True)
def _few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step as it is, with some of what may be computed again, and in another order, however quick it is."""
    monkeypatch.setattr(graph_search, "PLANS", 6)
    monkeypatch.setattr(graph_search, "REPAID", 10**9)


def _config(family: str, **strategy: Any) -> Any:
    # Experts' products in bfloat16 want wider rows than these have.
    compute = "float32" if family == "mixtral" else "bfloat16"
    return config_of(family, {"precision": {"compute": compute}, **strategy})


@cache
def _captured(family: str, shard: int = 1) -> StepGraph:
    with fake_ranks(shard, 0):
        return captured_step(family, _config(family, axes={"shard": shard}))


def _budget(step: StepGraph, share: float) -> int:
    """So far from the working set to the peak."""
    problem = build_problem(step, CLUSTER, 0, ())
    return int(problem.working_set + share * (max(problem.profile()) - problem.working_set))


@cache
def _planned(family: str, choices: Choices, shard: int = 1, room: int = 2**30) -> Planned:
    step = _captured(family, shard)
    return planned(
        step, CLUSTER, _budget(step, 0.3), (OffloadTier("host", room, SLOW, SLOW),), choices=choices
    )


def _talk(step: StepGraph) -> list[str]:
    return [node.name for node in step.nodes if is_collective(node) or is_wait(node)]


@pytest.mark.matrix
def test_what_is_computed_again_and_reordered_is_quicker_than_copies_alone() -> None:
    alone, both = _planned("llama", NEITHER), _planned("llama", BOTH)
    again = _planned("llama", Choices(order=False, update="device"))
    assert again.plan.seconds < 0.9 * alone.plan.seconds
    assert both.plan.seconds < 0.8 * alone.plan.seconds
    for found in (both, again):
        assert max(found.problem.profile(found.plan.moves)) == found.plan.peak <= found.problem.budget


@pytest.mark.parametrize("family", ["llama", pytest.param("mixtral", marks=pytest.mark.matrix)])
def test_the_bits_stay(family: str) -> None:
    found = _planned(family, BOTH)
    assert found.changed
    runtime = Poisoning(found.step, {"host": Shelf.of(found.step)})
    expected = Running(family, _captured(family), config=_config(family)).after(2)
    got = Running(family, found.step, runtime, _config(family)).after(2)
    assert expected.keys() == got.keys()
    assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())


@pytest.mark.matrix
def test_no_collective_is_repeated_or_moved() -> None:
    found = _planned("llama", BOTH, 2)
    assert found.changed and _talk(found.step) == _talk(_captured("llama", 2)) != []


def test_a_plan_says_what_was_changed_beside_moves() -> None:
    # Which of both a search takes where it has the choice is for the seconds to decide.
    again = _planned("llama", Choices(order=False, update="device"))
    ordered = _planned("llama", Choices(recompute=False, update="device"))
    for found, changed, other in (
        (again, "computed again", "another order"),
        (ordered, "another order", "computed again"),
    ):
        told = str(found)
        assert changed in told and other not in told
        assert told.splitlines()[0] in explained(found)
    assert not _planned("llama", NEITHER).changed


@pytest.mark.matrix
def test_the_same_step_has_the_same_plan() -> None:
    found = _planned("llama", BOTH)
    step, spaces = _captured("llama"), found.problem.spaces
    again = planned(step, CLUSTER, found.problem.budget, spaces, choices=BOTH)
    assert again.plan == found.plan and again.changed == found.changed


def test_a_step_that_does_not_wait_is_left_as_it_is() -> None:
    step = _captured("llama")
    quick = OffloadTier("host", 2**30, Rate(0.0, 1e15), Rate(0.0, 1e15))
    found = planned(step, CLUSTER, _budget(step, 0.3), (quick,), choices=BOTH)
    assert not found.changed and [node.name for node in found.graph.nodes] == [
        node.name for node in step.nodes
    ]


def test_without_room_elsewhere_computing_again_lowers_the_floor() -> None:
    step = _captured("llama")
    none = (OffloadTier("host", 0, SLOW, SLOW),)
    floors = []
    for choices in (NEITHER, BOTH):
        with pytest.raises(BudgetError) as refused:
            planned(step, CLUSTER, 1, none, choices=choices)
        floors.append(refused.value.floor)
    assert floors[1] < 0.9 * floors[0]
    assert planned(step, CLUSTER, floors[1], none, choices=BOTH).plan.peak <= floors[1]


def _searched(
    monkeypatch: pytest.MonkeyPatch, seconds: Callable[[tuple[int, ...]], float]
) -> list[tuple[int, ...]]:
    """The settings that a search of two dials of nine and of three settings plans in earnest, the best one first, where
    plans take so long."""
    step = _captured("llama")
    free = build_problem(step, CLUSTER, 0, ())
    settings: dict[StepGraph, tuple[int, ...]] = {step: (0, 0)}

    def dial(at: int) -> Callable[[StepGraph, int, bool], StepGraph]:
        def turn(before: StepGraph, setting: int, refused: bool) -> StepGraph:
            after, now = before.copy(), [*settings[before]]
            now[at] = setting
            settings[after] = (now[0], now[1])
            return after

        return turn

    earnest: list[tuple[int, ...]] = []

    def choose(problem: Problem, *, tries: int = 0, quick: bool = False, part: float = 1.0) -> Plan:
        now = (problem.budget // 10, problem.budget % 10)
        if not quick:
            earnest.append(now)
        return Plan((), 0, seconds(now), 1.0, 0, 0)

    def memory(graph: StepGraph) -> Problem:
        # A budget of so many bytes tells `choose` which graph it is.
        return replace(free, budget=10 * settings[graph][0] + settings[graph][1])

    monkeypatch.setattr(graph_search, "choose", choose)
    monkeypatch.setattr(graph_search, "PLANS", 16)
    dials = [graph_search.Dial("much", 9, 1, dial(0)), graph_search.Dial("kind", 3, 0, dial(1))]
    found = graph_search.search(step, memory(step), dials, memory)
    assert found.settings == min(earnest, key=seconds)
    return sorted(earnest, key=seconds)


@pytest.mark.parametrize("best", [(5, 0), (8, 2), (0, 1), (3, 1)])
def test_the_bottom_of_a_valley_is_found(monkeypatch: pytest.MonkeyPatch, best: tuple[int, int]) -> None:
    found = _searched(monkeypatch, lambda at: 10.0 + abs(at[0] - best[0]) + abs(at[1] - best[1]))
    assert found[0] == best
    assert len(found) == graph_search.LAST


def test_what_hides_behind_another_dial_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # Much is worth something only of the second kind.
    def seconds(at: tuple[int, ...]) -> float:
        return 20.0 - at[1] - (at[0] if at[1] == 2 else 0)

    assert _searched(monkeypatch, seconds)[0] == (8, 2)


def test_a_step_that_is_too_quick_to_repay_a_search_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_search, "REPAID", 0)
    step = _captured("llama")
    found = planned(
        step, CLUSTER, _budget(step, 0.3), (OffloadTier("host", 2**30, SLOW, SLOW),), choices=BOTH
    )
    assert found.plan.stall > 0
    assert found.changed == ()
