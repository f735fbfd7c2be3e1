"""What a plan comes to in time, step after step."""

from __future__ import annotations

import pytest

from harness.exact_plans import long_run
from harness.layouts import everything_away
from harness.memory_problems import drawn, under, with_update
from harness.simulated_plans import step_ends
from hyper_parallel.offloading.schedule.problem import (
    Buffer,
    Move,
    OffloadTier,
    Problem,
    Rate,
    UseInterval,
    replay,
)
from hyper_parallel.offloading.schedule.solve import choose


def test_a_link_that_has_more_to_carry_than_a_step_lasts_makes_the_step_longer() -> None:
    space = OffloadTier("host", 10**6, Rate(0.0, 100.0), Rate(0.0, 1e9))
    held = tuple(
        Buffer(at, count, "optimizer", (UseInterval(50 * at, 50 * at, True),), True)
        for at, count in ((0, 90), (1, 50))
    )
    problem = Problem([at / 100 for at in range(101)], held, (), (space,), 1000)
    moves = [Move(at, "host", 0, 50 * at + 1, 50 * at + 98, 50 * at + 99) for at in (0, 1)]
    found = replay(problem, moves)
    # 140 bytes a step over 100 B/s, of which the second step does not know yet.
    assert found.seconds == pytest.approx(1.4, abs=1e-6)
    assert found.stall == pytest.approx(0.4, abs=1e-6)


@pytest.mark.parametrize("seed", range(40))
def test_the_steps_are_those_of_a_long_run(seed: int) -> None:
    problem = drawn(seed)
    plan = choose(problem, tries=5)
    assert replay(problem, plan.moves).seconds == pytest.approx(long_run(problem, plan.moves), rel=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_the_steps_are_those_of_the_simulator(seed: int) -> None:
    problem = under(drawn(seed, 8, 12, tiers=1 + seed % 2), 0.3)
    if seed % 4 == 3:
        problem = under(with_update(problem), 0.3)
    for layout in (everything_away(problem), None):
        moves = choose(problem, tries=2).moves if layout is None else layout.moves(problem)
        # Of steps that repeat every 1, 2, 3, 4 or 6.
        ends = step_ends(problem, moves, 32)
        seconds = (ends[-1] - ends[-13]) / 12
        assert replay(problem, moves).seconds == pytest.approx(seconds, rel=1e-9)
