"""Lower bounds: below every plan there is, equal to what can be worked out by hand, and refused in words."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np
import pytest

from harness.exact_plans import long_run, plans
from harness.memory_problems import SMALL, drawn, llama, spaces
from hyper_parallel.offloading.schedule.linear_program import Linear, SolverError
from hyper_parallel.offloading.schedule.lower_bound import least_seconds, zero_stall_budget
from hyper_parallel.offloading.schedule.problem import (
    Buffer,
    Move,
    OffloadTier,
    Problem,
    Rate,
    UseInterval,
    replay,
)

TINY = [(seed, nodes, tiers) for nodes, tiers in ((4, 1), (5, 1), (4, 2)) for seed in range(8)]


def one(
    use: UseInterval, again: UseInterval, nodes: int, bandwidth: tuple[float, float], state: bool = False
) -> Problem:
    """A storage of 100 bytes used twice, another of 60 in between, one second for each node."""
    between = UseInterval((use.last + again.first) // 2, (use.last + again.first) // 2, True)
    held = (Buffer(0, 100, "activation", (use, again), state), Buffer(1, 60, "activation", (between,), False))
    space = OffloadTier("host", 2**30, Rate(0.0, bandwidth[0]), Rate(0.0, bandwidth[1]))
    return Problem(tuple(map(float, range(nodes + 1))), held, (), (space,), 160)


def test_no_plan_of_a_tiny_problem_is_better() -> None:
    looked = 0
    for seed, nodes, tiers in TINY:
        problem = drawn(seed, storages=3, nodes=nodes, tiers=tiers)
        free = zero_stall_budget(problem)
        tight = replace(problem, budget=(2 * problem.working_set + free) // 3)
        try:
            every, kept = list(plans(problem, 1500)), list(plans(tight, 1500))
        except ValueError:
            continue
        looked += 1
        bound = least_seconds(tight)
        for moves in kept:
            assert bound <= long_run(problem, moves) * (1 + 1e-9), (seed, nodes, tiers, moves)
        quick = [
            max(problem.profile(m)) for m in every if long_run(problem, m) <= problem.starts[-1] * (1 + 1e-9)
        ]
        assert free <= min(quick), (seed, nodes, tiers)
    assert looked > 8


@pytest.mark.parametrize("seed", range(4))
def test_fewer_places_make_no_higher_bound(seed: int) -> None:
    problem = drawn(seed)
    every = zero_stall_budget(problem)
    assert all(zero_stall_budget(problem, places=places) <= every for places in (4, 8, 16, 32))
    tight = replace(problem, budget=(problem.working_set + every) // 2)
    whole = least_seconds(tight) * (1 + 1e-9)
    assert all(least_seconds(tight, places=places) <= whole for places in (4, 8, 16, 32))


def test_a_half_that_there_is_time_for() -> None:
    # Two seconds to go before the place, two to come back: 50 of 100 bytes at 25 B/s.
    problem = one(UseInterval(0, 0, True), UseInterval(6, 6, False), 7, (25.0, 1e9))
    assert zero_stall_budget(problem) == 160 - 50
    assert zero_stall_budget(replace(problem, budget=1)) == 160 - 50
    back = one(UseInterval(0, 0, True), UseInterval(6, 6, False), 7, (1e9, 25.0))
    assert zero_stall_budget(back) == 160 - 50
    # All of it away at the place takes two more seconds out.
    assert least_seconds(replace(problem, budget=100)) == pytest.approx(7 + (60 / 25 - 2))
    assert least_seconds(replace(problem, budget=110)) == pytest.approx(7)


def test_what_a_slot_has_is_not_stored_again() -> None:
    # The link out would take a year.
    for writes, least in ((False, 100), (True, 160)):
        problem = one(UseInterval(0, 0, False), UseInterval(6, 6, writes), 7, (1e-6, 1e9), state=True)
        assert zero_stall_budget(problem) == least
    # What is born was never stored before, whatever its first use does.
    assert zero_stall_budget(one(UseInterval(0, 0, False), UseInterval(6, 6, False), 7, (25.0, 1e9))) == 110


def test_a_copy_serves_two_gaps() -> None:
    # Five seconds to store it in the first gap; two would be too few in the second, in which it has to be away.
    uses = (UseInterval(0, 0, True), UseInterval(6, 6, False), UseInterval(12, 12, False))
    held = (
        Buffer(0, 100, "activation", uses, False),
        Buffer(1, 60, "activation", (UseInterval(9, 9, True),), False),
    )
    space = OffloadTier("host", 2**30, Rate(0.0, 25.0), Rate(0.0, 1e9))
    problem = Problem(tuple(map(float, range(14))), held, (), (space,), 100)
    assert zero_stall_budget(problem) == 100
    written = replace(held[0], busy=(uses[0], UseInterval(6, 6, True), uses[2]))
    assert zero_stall_budget(replace(problem, held=(written, held[1]))) == 110


def test_a_copy_may_be_made_behind_the_last_chosen_place_of_a_gap() -> None:
    uses = (UseInterval(0, 0, True), UseInterval(6, 6, False), UseInterval(12, 12, False))
    held = (
        Buffer(0, 100, "activation", uses, False),
        Buffer(1, 60, "activation", (UseInterval(9, 9, True),), False),
        Buffer(2, 100, "parameter", (UseInterval(0, 0, False), UseInterval(3, 12, False)), True),
        Buffer(3, 10, "activation", (UseInterval(1, 1, True),), False),
    )
    space = OffloadTier("host", 2**30, Rate(0.0, 25.0), Rate(0.0, 1e9))
    problem = Problem(tuple(map(float, range(14))), held, (), (space,), 100)
    # Of the first gap only node 1 is looked at, and there is time to store at nodes 2 to 5.
    assert zero_stall_budget(problem, places=6) <= zero_stall_budget(problem) == 200


def test_a_copy_may_be_made_before_the_first_chosen_place_of_a_gap_in_which_it_stays() -> None:
    # Nodes 7 and 10 are looked at. Six seconds to store it lie before node 7, and three behind it.
    uses = (UseInterval(0, 0, True), UseInterval(8, 8, False), UseInterval(20, 20, False))
    held = (
        Buffer(0, 100, "activation", uses, False),
        Buffer(1, 299, "activation", (UseInterval(10, 10, True),), False),
        Buffer(2, 300, "activation", (UseInterval(7, 7, True),), False),
        Buffer(3, 299, "activation", (UseInterval(9, 9, True), UseInterval(11, 11, False)), False),
    )
    space = OffloadTier("host", 2**30, Rate(0.0, 17.0), Rate(0.0, 12.0))
    problem = Problem(tuple(map(float, range(22))), held, (), (space,), 598)
    moves = [Move(0, "host", 1, 1, 9, 11)]
    assert replay(problem, moves).stall == 0.0 and max(problem.profile(moves)) == 598
    assert zero_stall_budget(problem, places=2) <= 598


def test_state_goes_around_the_end_of_the_step() -> None:
    # Used in the middle, it is away over the end, and the link has a step's time for it in all.
    held = (
        Buffer(0, 100, "optimizer", (UseInterval(5, 5, True),), True),
        Buffer(1, 60, "activation", (UseInterval(0, 0, True),), False),
    )
    space = OffloadTier("host", 2**30, Rate(0.0, 10.0), Rate(0.0, 10.0))
    problem = Problem(tuple(map(float, range(11))), held, (), (space,), 100)
    # Four seconds out before the place (6 to 10) and four back (1 to 5): 40 bytes.
    assert zero_stall_budget(problem) == 120


def test_a_full_space_limits_what_is_away() -> None:
    problem = one(UseInterval(0, 0, True), UseInterval(6, 6, False), 7, (1e9, 1e9))
    assert zero_stall_budget(problem) == 100
    full = replace(problem, spaces=(replace(problem.spaces[0], bytes=30),))
    assert zero_stall_budget(full) == 130
    assert least_seconds(replace(full, budget=129)) == math.inf
    second = replace(problem.spaces[0], name="flash", bytes=20)
    assert zero_stall_budget(replace(full, spaces=(*full.spaces, second))) == 110


def test_a_step_shaped_like_a_llama() -> None:
    slow, quick = (replace(llama(SMALL), spaces=spaces(gib)) for gib in (0.5, 4.0))
    peak, least = max(slow.profile()), slow.working_set
    budgets = [zero_stall_budget(problem, places=48) for problem in (quick, slow)]
    assert least <= budgets[0] < budgets[1] < peak
    # At the budget without stalls the step may be as quick as it ever is; below, it is not.
    at = replace(slow, budget=budgets[1])
    assert least_seconds(at, places=48) == pytest.approx(slow.starts[-1], rel=1e-6)
    assert least_seconds(replace(at, budget=(least + budgets[1]) // 2), places=48) > 1.1 * slow.starts[-1]


def test_what_needs_no_solver() -> None:
    problem = drawn(1)
    assert least_seconds(problem) == problem.starts[-1]
    assert least_seconds(replace(problem, budget=problem.working_set - 1)) == math.inf
    assert zero_stall_budget(replace(problem, spaces=())) == max(problem.profile())


def test_without_the_solver_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(SolverError, match=r"pip install 'hyper-parallel\[bounds\]'"):
        zero_stall_budget(drawn(1))


def test_a_linear_program_and_its_bound() -> None:
    linear = Linear()
    first, second = linear.new(2, 10.0, 1.0), linear.new(1, 4.0, 3.0)
    both = linear.where(np.array([5.0, 20.0]), np.inf)
    linear.add(both, first, [1.0, 2.0])
    linear.add(both[1], second, 1.0)
    assert linear.least(10.0) == pytest.approx(5 + 10, abs=1e-9)
    assert linear.least(10.0) <= 15
    never = linear.where(15.0, np.inf)
    linear.add(never, first[0], 1.0)
    assert linear.least(10.0) == math.inf
