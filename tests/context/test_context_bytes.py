"""What ranks receive is what docs/context.md says, counted on real workers."""

from __future__ import annotations

import pytest
from context_cases import Case, spread

from harness import run_ranks
from hyper_parallel.compat import collectives

FP64, ROWS = 8, 2


def _received(rank: int, world: int, case: Case, ring: int, ulysses: int) -> list[int]:
    with collectives.counting() as counted:
        spread(case, ring, ulysses)
    return [call.bytes_received for call in counted]


@pytest.mark.parametrize(("ring", "ulysses"), [(4, 1), (1, 4), (2, 2)])
def test_bytes_meet_the_closed_forms(ring: int, ulysses: int) -> None:
    case = Case(heads=8, pairs=2)
    kv = max(case.pairs, ulysses)  # repeated until each rank has one
    positions = ROWS * FP64 * case.size * case.length
    # Keys and values travel in both passes, and their gradients go home.
    rings = 3 * 2 * (kv // ulysses) * positions * (ring - 1) / ring
    inner = (2 * case.heads + 2 * kv) * positions / ring * (ulysses - 1) / ulysses**2
    for received in run_ranks(_received, ring * ulysses, case, ring, ulysses):
        assert sum(received) == rings + 2 * inner


def test_a_window_leaves_out_the_steps_beyond_it() -> None:
    whole, windowed = (
        run_ranks(_received, 4, Case(length=64, window=window), 4, 1)[0] for window in (None, 5)
    )
    # Of the three steps those to the two neighbours are left: two of three messages in each pass, and gradients home.
    assert sum(windowed) * 3 == sum(whole) * 2
