"""Live bytes, counted from lifetimes, beside the sum at each moment."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.trace.live_bytes import LiveBytes, peak, profile, wrapped

MOMENTS = 12


@st.composite
def lifetimes(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """(first, end, bytes); some are empty, some have no bytes."""
    found = draw(st.lists(st.tuples(st.integers(0, MOMENTS), st.integers(0, MOMENTS), st.integers(0, 9))))
    return [(min(first, end), max(first, end), count) for first, end, count in found]


def alive(lives: list[tuple[int, int, int]], moment: int) -> int:
    return sum(count for first, end, count in lives if first <= moment < end)


@given(lifetimes())
def test_each_moment_has_what_holds_it(lives: list[tuple[int, int, int]]) -> None:
    assert profile(lives, MOMENTS) == [alive(lives, moment) for moment in range(MOMENTS)]


@given(lifetimes())
def test_the_peak_is_the_first_moment_with_most(lives: list[tuple[int, int, int]]) -> None:
    counts = [alive(lives, moment) for moment in range(MOMENTS)]
    most, at = peak(lives)
    assert most == max(counts)
    assert at == (counts.index(most) if most else None)


@given(st.integers(0, 9), st.lists(st.integers(-9, 9)))
def test_the_running_sum_knows_its_most(begin: int, changes: list[int]) -> None:
    live, sums = LiveBytes(begin), [begin]
    for change in changes:
        sums.append(sums[-1] + change)
        assert live.add(change) == (sums[-1] > max(sums[:-1]))
    assert (live.alive, live.most) == (sums[-1], max(sums))


@given(st.integers(0, 19), st.integers(0, 10))
def test_a_stretch_that_goes_on_in_the_next_step_is_of_the_same_nodes(first: int, length: int) -> None:
    stretches = wrapped(first, min(first + length, 20), 10)
    nodes = [node for begin, end in stretches for node in range(begin, end)]
    assert nodes == [place % 10 for place in range(first, min(first + length, 20))]
