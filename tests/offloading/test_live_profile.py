"""The profile that is kept up to date, beside the count of all lifetimes anew."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.offloading.schedule.idle_intervals import LiveProfile
from hyper_parallel.trace.live_bytes import profile, wrapped

NODES = 7
STRETCH = st.tuples(st.integers(0, 2 * NODES), st.integers(0, NODES), st.integers(-9, 9)).map(
    lambda drawn: (drawn[0], min(drawn[0] + drawn[1], 2 * NODES), drawn[2])
)


def counted(stretches: list[tuple[int, int, int]]) -> list[int]:
    parts = [(*part, count) for first, end, count in stretches for part in wrapped(first, end, NODES)]
    return profile(parts, NODES)


@settings(max_examples=150, deadline=None)
@given(st.lists(STRETCH), st.lists(STRETCH))
def test_changes_come_to_what_all_lifetimes_do(
    before: list[tuple[int, int, int]], after: list[tuple[int, int, int]]
) -> None:
    columns = np.array(before, dtype=np.int64).reshape(-1, 3).T
    first = LiveProfile(np.zeros(NODES, dtype=np.int64)).with_all(*columns)
    live = first.copy()
    for at, (begin, end, count) in enumerate(after):
        live.add(begin, end, count) if at % 2 else live.add(end, begin, -count)
    assert first.at.tolist() == counted(before)
    assert live.at.tolist() == counted([*before, *after])
    assert live.peak == max(0, *live.at.tolist())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=NODES, max_size=NODES), STRETCH, st.integers(0, 9))
def test_a_stretch_is_asked_node_by_node(
    counts: list[int], stretch: tuple[int, int, int], limit: int
) -> None:
    live, (first, end, _) = LiveProfile(np.array(counts)), stretch
    there = [counts[place % NODES] for place in range(first, end)]
    over = [first + at for at, count in enumerate(there) if count > limit]
    assert live.most(first, end) == max(there, default=0)
    assert live.first_over(first, end, limit) == (over[0] if over else end)
    assert live.under_from(first, end, limit) == (over[-1] + 1 if over else first)
