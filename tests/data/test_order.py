"""The order of the rows: a permutation an epoch, whoever asks and however many at once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.data import Order

lengths = st.integers(1, 700)
seeds = st.integers(-(2**40), 2**80)


@settings(deadline=None)
@given(seeds, lengths, st.integers(0, 3))
def test_an_epoch_is_a_permutation(seed: int, length: int, epoch: int) -> None:
    rows = Order(seed, length).rows(epoch * length, length)
    assert sorted(rows) == list(range(length))


@settings(deadline=None)
@given(seeds, lengths, st.lists(st.integers(0, 200), max_size=8))
def test_how_many_are_asked_for_at_once_does_not_matter(seed: int, length: int, counts: list[int]) -> None:
    order = Order(seed, length)
    whole = order.rows(0, sum(counts))
    consumed, found = 0, []
    for count in counts:
        found += Order(seed, length).rows(consumed, count)
        consumed += count
    assert found == whole


@settings(max_examples=20, deadline=None)
@given(seeds, st.integers(2**31, 2**62), st.integers(0, 2**70))
def test_a_huge_length_costs_nothing(seed: int, length: int, consumed: int) -> None:
    rows = Order(seed, length).rows(consumed, 50)
    assert len(set(rows)) == 50 or consumed % length > length - 50
    assert all(0 <= row < length for row in rows)


def test_epochs_and_seeds_differ() -> None:
    order = Order(7, 1000)
    first, second = order.rows(0, 1000), order.rows(1000, 1000)
    assert first != second
    assert first != Order(8, 1000).rows(0, 1000)
    assert first != list(range(1000))


def test_every_row_comes_first_about_equally_often() -> None:
    counts = [0] * 5
    for seed in range(2000):
        counts[Order(seed, 5).rows(0, 1)[0]] += 1
    assert min(counts) > 300 and max(counts) < 500


def test_neighbours_are_torn_apart() -> None:
    rows = Order(3, 10_000).rows(0, 10_000)
    close = sum(abs(a - b) < 10 for a, b in itertools.pairwise(rows))
    assert close < 60  # 19 are expected of a random permutation


def test_the_order_is_the_same_in_every_version() -> None:
    # A checkpoint keeps only how much was consumed: a change here would repeat and skip rows on resume.
    assert Order(0, 10).rows(0, 10) == ORDER_0_10


def test_no_rows_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        Order(0, 0)


ORDER_0_10 = [7, 9, 4, 3, 6, 8, 5, 1, 2, 0]
