"""The choice of places and replicas: a function of loads, held against all placements where these can be counted."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.shard.experts.placement import (
    Placement,
    heaviest,
    place,
    replicas_needed,
    rows_of_ranks,
)

LIMIT = 1.15


def zipf(experts: int, skew: float = 1.0, rows: int = 100_000) -> list[float]:
    """Loads by a Zipf law, the heaviest experts neighbours."""
    weights = [1 / (at + 1) ** skew for at in range(experts)]
    return [round(rows * weight / sum(weights)) for weight in weights]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], Placement, int]:
    ranks, local = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    experts = ranks * local
    loads = draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts))
    replicas = draw(st.sets(st.integers(0, experts - 1), max_size=experts))
    order = tuple(draw(st.permutations(range(experts))))
    return [float(load) for load in loads], Placement(order, tuple(sorted(replicas))), ranks


@settings(deadline=None)
@given(cases())
def test_a_placement_is_one_and_never_worse(case: tuple[list[float], Placement, int]) -> None:
    loads, current, ranks = case
    found = place(loads, current, ranks, LIMIT)
    assert sorted(found.order) == list(range(len(loads)))
    assert len(set(found.replicas)) == len(current.replicas) and sorted(found.replicas) == [*found.replicas]
    assert rows_of_ranks(loads, found, ranks).sum() == pytest.approx(sum(loads))
    before, after = heaviest(loads, current, ranks), heaviest(loads, found, ranks)
    assert found is current if before <= LIMIT else after <= before
    assert place(loads, current, ranks, LIMIT) == found


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 100), min_size=6, max_size=6))
def test_what_is_found_is_near_the_best_of_all(loads: list[int]) -> None:
    ranks, start = 3, Placement(tuple(range(6)))
    best = min(heaviest(loads, Placement(order), ranks) for order in itertools.permutations(range(6)))
    # LPT of pairs is within 7/6 of the best; below the limit nobody looks further.
    assert heaviest(loads, place(loads, start, ranks, LIMIT), ranks) <= max(LIMIT, 7 / 6 * best) + 1e-9


@pytest.mark.parametrize("skew", [0.6, 0.8, 1.0, 1.2])
@pytest.mark.parametrize("experts", [64, 128, 256])
def test_zipf_on_eight_ranks_with_as_many_replicas_as_are_needed(experts: int, skew: float) -> None:
    loads = zipf(experts, skew)
    start = Placement.initial(experts, replicas_needed(loads, 8, LIMIT))
    assert len(start.replicas) <= 4
    assert heaviest(loads, Placement.initial(experts, 0), 8) > 1.5
    assert heaviest(loads, place(loads, start, 8, LIMIT), 8) <= LIMIT
    if start.replicas:
        fewer = Placement.initial(experts, len(start.replicas) - 1)
        assert heaviest(loads, place(loads, fewer, 8, LIMIT), 8) > LIMIT


def test_few_experts_move_where_few_are_out_of_place() -> None:
    loads = [100.0] * 16
    loads[0] = loads[1] = 190.0
    found = place(loads, Placement(tuple(range(16))), 4, LIMIT)
    assert sum(a != b for a, b in zip(found.order, range(16), strict=True)) == 2


def test_the_hottest_have_the_replicas_and_stay_where_they_are() -> None:
    loads = [1.0, 1.0, 1.0, 1.0, 50.0, 1.0, 1.0, 20.0]
    found = place(loads, Placement.initial(8, 2), 4, LIMIT)
    assert found == Placement(tuple(range(8)), (4, 7))


def test_without_rows_nothing_moves() -> None:
    start = Placement.initial(8, 1)
    assert place([0.0] * 8, start, 4, LIMIT) is start
