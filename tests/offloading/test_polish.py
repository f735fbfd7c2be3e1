"""Small plans changed bit by bit: quicker plans that keep every rule, the same ones every time."""

from dataclasses import replace

import pytest

from harness.check_moves import check_moves
from harness.layouts import everything_away
from harness.memory_problems import drawn, under
from hyper_parallel.offloading.schedule.local_search import polish
from hyper_parallel.offloading.schedule.problem import replay

WORK = 200_000


@pytest.mark.parametrize("seed", range(3))
def test_keeps_every_rule_and_is_quicker(seed: int) -> None:
    problem = under(drawn(seed, 16, 30), 0.3)
    layout = everything_away(problem)
    before = layout.moves(problem)
    replayed = replay(problem, before)
    found, then = polish(problem, layout.gaps, [layout], WORK)
    moves = found.moves(problem)
    check_moves(problem, moves)
    assert max(problem.profile(moves)) <= problem.budget
    assert then == replay(problem, moves)
    assert then.seconds < replayed.seconds
    assert layout.moves(problem) == before
    again, _ = polish(problem, layout.gaps, [everything_away(problem)], WORK)
    assert again.moves(problem) == moves


def test_the_best_of_several_goes_on() -> None:
    problem = under(drawn(1, 16, 30), 0.3)
    layout = everything_away(problem)
    better, then = polish(problem, layout.gaps, [layout], WORK)
    found, last = polish(problem, layout.gaps, [layout, better, layout], 3 * WORK)
    check_moves(problem, found.moves(problem))
    assert last.seconds <= then.seconds


def test_keeps_within_the_room_of_each_space() -> None:
    problem = under(drawn(3, 16, 30, tiers=2), 0.6)
    small = replace(problem.spaces[0], bytes=sum(held.bytes for held in problem.held) // 3)
    problem = replace(problem, spaces=(small, problem.spaces[1]))
    layout = everything_away(problem)
    found, _ = polish(problem, layout.gaps, [layout], WORK)
    check_moves(problem, found.moves(problem))


def test_seeks_no_less_stall_than_asked_for() -> None:
    problem = under(drawn(1, 16, 30), 0.3)
    layout = everything_away(problem)
    replayed = replay(problem, layout.moves(problem))
    assert replayed.stall > 0
    assert polish(problem, layout.gaps, [layout], WORK, enough=replayed.stall) == (layout, replayed)
    assert polish(problem, layout.gaps, [layout], 0) == (layout, replayed)
