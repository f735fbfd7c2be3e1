"""Rows dealt to data ranks and micro-batches: each row once, alike rows in their order, and never more work at once."""

from __future__ import annotations

import random

import pytest

from hyper_parallel.data.order import RowWork, dealt


def _longest(work: list[RowWork], places: list[int], ranks: int, micro: int) -> float:
    """Σ over micro-batches of the longest row's positions, padded, and of the largest work of a rank's encoders."""
    share, found = len(work) // ranks, 0.0
    for first in range(0, share, micro):
        at = [places[rank * share + first : rank * share + first + micro] for rank in range(ranks)]
        found += micro * max(work[place].positions for own in at for place in own)
        found += max(sum(work[place].encoder for place in own) for own in at)
    return found


def _drawn(draw: random.Random, rows: int) -> list[RowWork]:
    """Text of some length, and images that are positions of it too."""
    images = [draw.lognormvariate(0, 1) for _ in range(rows)]
    return [RowWork(draw.uniform(1, 4) + one, 3 * one) for one in images]


@pytest.mark.parametrize("seed", range(20))
def test_each_row_is_computed_once_and_ranks_wait_less(seed: int) -> None:
    draw = random.Random(seed)
    ranks, micro, count = draw.choice((1, 2, 4, 8)), draw.choice((1, 2, 4)), draw.choice((1, 3, 4))
    work = _drawn(draw, ranks * micro * count)
    places = dealt(work, ranks, micro)
    assert sorted(places) == list(range(len(work)))
    given = _longest(work, list(range(len(work))), ranks, micro)
    found = _longest(work, places, ranks, micro)
    assert found <= given * (1 + 1e-9)
    # No dealing is shorter than the mean.
    assert found >= sum(one.total for one in work) / ranks * (1 - 1e-9)


def test_alike_rows_stay_where_they_are() -> None:
    assert dealt([RowWork(3.0, 1.0)] * 8, 2, 2) == list(range(8))


def test_skewed_rows_are_nearly_even() -> None:
    """Rows of one length with 0 to 32 images, whose encoder is a quarter of the work."""
    draw = random.Random(0)
    images = [min(32, round(draw.lognormvariate(0.7, 1.2))) for _ in range(64)]
    mean = sum(images) / len(images)
    work = [RowWork(3.0 * mean, one) for one in images]
    given = _longest(work, list(range(64)), 8, 1)
    found = _longest(work, dealt(work, 8, 1), 8, 1)
    even = sum(one.total for one in work) / 8
    assert found < 1.2 * even
    assert given > 1.3 * even
