"""Tiny problems, of which every plan can be tried: the planner comes within 3% of the best."""

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import prod

import pytest

from harness.check_moves import check_moves
from harness.memory_problems import drawn, under
from hyper_parallel.offloading.schedule.problem import Move, Problem, replay
from hyper_parallel.offloading.schedule.solve import choose

AT_MOST = 3000
"""Plans that are tried."""
WITHIN = 1.03


def options(problem: Problem) -> list[list[Move | None]]:
    """Of each gap: stay, or leave and come back at any two places, stored as soon as it is final or idle."""
    found = []
    for held in problem.held:
        gaps = zip(held.gaps(problem.nodes), held.opens(problem.nodes), strict=True)
        for gap, ((after, used), opens) in enumerate(gaps):
            stores = sorted({opens, after})
            places = [(leave, fetch) for leave in range(after, used) for fetch in range(leave + 1, used + 1)]
            if held.movable and places:
                moves = [
                    Move(held.storage, "host", gap, store, *place) for store in stores for place in places
                ]
                found.append([None, *moves])
    return found


def valid(problem: Problem, moves: list[Move]) -> Iterator[list[Move]]:
    """The same moves with as few stores as the rules allow; none where a store begins while its storage is away."""
    kept = list(moves)
    for index, move in enumerate(moves):
        without = [*kept[:index], replace(move, store=None), *kept[index + 1 :]]
        try:
            check_moves(problem, without)
        except ValueError:
            continue
        kept = without
    with suppress(ValueError):
        check_moves(problem, kept)
        yield kept


def best(problem: Problem) -> float | None:
    """Seconds of the quickest of all plans; None where there are too many."""
    choices = options(problem)
    if prod(map(len, choices)) > AT_MOST:
        return None
    found = float("inf")
    for chosen in product(*choices):
        moves = [move for move in chosen if move is not None]
        if max(problem.profile(moves)) <= problem.budget:
            found = min([found, *(replay(problem, kept).seconds for kept in valid(problem, moves))])
    return found


def tiny(seed: int) -> Problem:
    """With a link so slow that copies seldom hide."""
    draw = random.Random(seed)
    problem = drawn(seed, draw.choice((3, 4)), draw.choice((6, 7, 8)))
    slow = [
        replace(
            space,
            **{
                way: replace(rate, bandwidth=rate.bandwidth / 3)
                for way, rate in (("out", space.out), ("back", space.back))
            },
        )
        for space in problem.spaces
    ]
    return under(replace(problem, spaces=tuple(slow)), draw.choice((0.0, 0.3, 0.6)))


@pytest.mark.parametrize("first", [100, 120])
def test_within_three_percent_of_the_best_of_all_plans(first: int) -> None:
    tried = stalled = 0
    for problem in map(tiny, range(first, first + 20)):
        least = best(problem)
        if least is None or max(problem.profile()) <= problem.budget:
            continue
        tried += 1
        stalled += least > problem.starts[-1] * (1 + 1e-9)
        assert choose(problem, tries=20).seconds <= WITHIN * least
    assert tried >= 5 and stalled >= 2
