"""Single places changed: quicker plans that keep every rule, the same ones every time."""

from dataclasses import replace

import numpy as np
import pytest

from harness.check_moves import check_moves
from harness.memory_problems import drawn, under
from hyper_parallel.offloading.chosen import Chosen
from hyper_parallel.offloading.floor import farthest
from hyper_parallel.offloading.gaps import gaps_of
from hyper_parallel.offloading.layout import Layout
from hyper_parallel.offloading.moves import replay
from hyper_parallel.offloading.polish import polish
from hyper_parallel.offloading.problem import Problem


def poor(problem: Problem) -> Layout:
    """Everything is away for as long as it can be."""
    gaps = gaps_of(problem)
    chosen = Chosen(problem, gaps)
    for row in range(len(gaps)):
        chosen.add(row)
    return farthest(gaps, np.array(problem.profile()), problem.budget, chosen)


@pytest.mark.parametrize("seed", range(6))
def test_keeps_every_rule_and_is_quicker(seed: int) -> None:
    problem = under(drawn(seed, 16, 30), 0.3)
    layout = poor(problem)
    before = layout.moves(problem)
    replayed = replay(problem, before)
    found, then = polish(problem, layout, replayed, 240)
    moves = found.moves(problem)
    check_moves(problem, moves)
    assert max(problem.profile(moves)) <= problem.budget
    assert then == replay(problem, moves)
    assert then.seconds < replayed.seconds
    assert layout.moves(problem) == before
    assert polish(problem, poor(problem), replayed, 240)[0].moves(problem) == moves


def test_keeps_within_the_room_of_each_space() -> None:
    problem = under(drawn(3, 16, 30, tiers=2), 0.6)
    small = replace(problem.spaces[0], bytes=sum(held.bytes for held in problem.held) // 3)
    problem = replace(problem, spaces=(small, problem.spaces[1]))
    layout = poor(problem)
    found, _ = polish(problem, layout, replay(problem, layout.moves(problem)), 240)
    check_moves(problem, found.moves(problem))


def test_seeks_no_less_stall_than_asked_for() -> None:
    problem = under(drawn(1, 16, 30), 0.3)
    layout = poor(problem)
    replayed = replay(problem, layout.moves(problem))
    assert replayed.stall > 0
    assert polish(problem, layout, replayed, 240, enough=replayed.stall) == (layout, replayed)
    assert polish(problem, layout, replayed, 0) == (layout, replayed)
