"""The program of whole copies: below the best of all plans of tiny problems, and next to it."""

import random
from dataclasses import replace
from itertools import product

import pytest

from harness.exact_milp import Asked, Exact
from harness.exact_plans import long_run, plans
from harness.memory_problems import drawn, under
from hyper_parallel.offloading.schedule.problem import Problem
from hyper_parallel.offloading.schedule.solve import choose

ROUNDING = 1e-5
"""Of the step: of the solver, which keeps to rows by 1e-6."""


def tiny(seed: int) -> Problem:
    """So few gaps that all plans can be tried, and links so slow that nodes wait."""
    problem = drawn(seed, 3, 6)
    slow = [
        replace(
            space,
            out=replace(space.out, bandwidth=space.out.bandwidth / 3),
            back=replace(space.back, bandwidth=space.back.bandwidth / 3),
        )
        for space in problem.spaces
    ]
    return under(replace(problem, spaces=tuple(slow)), random.Random(seed).choice((0.0, 0.3)))


def test_proves_the_best_of_all_plans_of_tiny_problems() -> None:
    met = 0
    for problem in map(tiny, range(60)):
        try:
            found = [long_run(problem, moves) for moves in plans(problem, most=2000)]
        except ValueError:
            continue
        if not found or min(found) <= problem.starts[-1] * (1 + ROUNDING):
            continue
        proved = Exact(problem).solve(10.0, near=1e-7)
        assert proved.bound <= min(found) * (1 + ROUNDING)
        assert proved.closed and proved.bound == pytest.approx(proved.seconds, rel=ROUNDING)
        met += proved.bound >= min(found) * (1 - ROUNDING)
    assert met >= 8


def test_a_plan_is_a_solution_to_begin_with() -> None:
    problem = under(drawn(5, 12, 30), 0.2)
    plan = choose(problem, tries=2)
    assert plan.stall > 0
    proved = Exact(problem).solve(1.0, plan.moves, near=1.0)
    assert proved.bound <= plan.seconds * (1 + ROUNDING)
    assert proved.seconds <= plan.seconds * (1 + ROUNDING)


def test_what_is_quicker_than_the_best_is_proved_not_to_be() -> None:
    problem = under(drawn(5, 8, 20), 0.2)
    best = Exact(problem).solve(5.0, near=1e-7)
    assert best.closed and best.bound > problem.starts[-1] * 1.01
    quicker = Exact(problem).solve(5.0, below=0.99 * best.bound)
    assert quicker.bound == 0.99 * best.bound and quicker.seconds == float("inf")
    slower = Exact(problem).solve(5.0, below=1.01 * best.bound, near=1e-7)
    assert slower.bound == pytest.approx(best.bound, rel=ROUNDING)


def test_covers_hold_for_all_that_frees_enough() -> None:
    draw = random.Random(0)
    broken = 0
    for _ in range(40):
        shares = [draw.choice((0.02, 0.3, 0.7, 1.0)) * draw.uniform(0.3, 1.0) for _ in range(6)]
        asked = Asked(list(range(6)), [None] * 6, shares)
        values = [draw.random() for _ in shares]
        factors = asked.cover(values)
        if factors is None:
            continue
        broken += 1
        assert sum(factor * value for factor, value in zip(factors, values, strict=True)) < 1
        for away in product((0, 1), repeat=6):
            if sum(share * one for share, one in zip(shares, away, strict=True)) >= 1:
                assert sum(factor * one for factor, one in zip(factors, away, strict=True)) >= 1 - 1e-9
    assert broken >= 10


def test_no_plan_at_all() -> None:
    problem = replace(tiny(0), budget=tiny(0).working_set - 1)
    assert Exact(problem).solve(1.0).bound == float("inf")


def test_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="one space"):
        Exact(drawn(0, tiers=2))
