"""Each rule of moves, broken once."""

from dataclasses import replace

import pytest

from harness.check_moves import check_moves, occupied
from hyper_parallel.offloading.schedule.problem import (
    Buffer,
    Move,
    OffloadTier,
    Problem,
    Rate,
    UseInterval,
    replay,
)

HOST = OffloadTier("host", 100, Rate(0.0, 10.0), Rate(0.0, 10.0))
FLASH = OffloadTier("flash", 100, Rate(0.0, 1.0), Rate(0.0, 1.0))


def busy(*places: int, writes: tuple[int, ...] = ()) -> tuple[UseInterval, ...]:
    return tuple(UseInterval(place, place, place in writes) for place in places)


WEIGHT = Buffer(0, 40, "parameter", busy(1, 5, 9, writes=(9,)), state=True)
ACTIVATION = Buffer(1, 30, "activation", busy(0, 4, 8, writes=(0, 4)), state=False)
FROZEN = Buffer(2, 20, "parameter", busy(2, 6), state=True)
FIXED = Buffer(3, 10, "buffer", busy(3), state=True, movable=False)
MOMENT = Buffer(4, 10, "optimizer", busy(3, 6, writes=(6,)), state=True)
PROBLEM = Problem(
    tuple(map(float, range(11))), (WEIGHT, ACTIVATION, FROZEN, FIXED, MOMENT), (), (HOST, FLASH), 100
)

GOOD = [
    [],
    [Move(0, "host", 0, 2, 3, 5), Move(0, "host", 1, None, 6, 9)],
    [Move(0, "host", 2, 10, 10, 11), Move(0, "host", 0, None, 2, 5), Move(0, "host", 1, None, 6, 9)],
    [Move(1, "flash", 0, 1, 2, 4), Move(1, "host", 1, 5, 5, 8)],
    [Move(2, "host", 0, None, 3, 6)],
    [Move(2, "host", 0, None, 3, 6), Move(2, "host", 1, None, 7, 12)],
    # Stored in the step before, in an earlier gap, and while it is read.
    [Move(0, "host", 0, 0, 2, 5), Move(0, "host", 1, None, 6, 9)],
    [Move(0, "host", 1, 0, 6, 9)],
    [Move(4, "host", 0, -3, 4, 6)],
    [Move(0, "host", 1, 5, 7, 9)],
]


@pytest.mark.parametrize("moves", GOOD)
def test_moves_that_obey_the_rules(moves: list[Move]) -> None:
    check_moves(PROBLEM, moves)


BAD = {
    "places must be": Move(0, "host", 2, 10, 11, 11),
    "places must be 2": Move(0, "host", 0, 1, 1, 5),
    "places must be 2 ≤": Move(0, "host", 0, 2, 3, 6),
    "must begin from 0 on": Move(0, "host", 0, -1, 3, 5),
    "must begin from 5 on": Move(1, "host", 1, 4, 5, 8),
    "not behind the leave": Move(0, "host", 0, 4, 3, 5),
    "no such storage": Move(9, "host", 0, 2, 3, 5),
    "no such space": Move(0, "pool", 0, 2, 3, 5),
    "may not move": Move(3, "host", 0, 4, 5, 12),
    "has 2 gaps": Move(1, "host", 2, 9, 9, 10),
    "nothing in host holds": Move(0, "host", 0, None, 3, 5),
}


@pytest.mark.parametrize("said", BAD)
def test_a_broken_rule_is_named(said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_moves(PROBLEM, [BAD[said]])


@pytest.mark.parametrize("store", [0, 1, 2, 5])
def test_what_is_away_cannot_be_stored(store: int) -> None:
    """Of the gap over the step's end until the first use, of the next one until the second."""
    around, second = Move(0, "host", 2, 10, 10, 11), Move(0, "host", 1, store, 6, 9)
    others = [around] if store < 2 else [Move(0, "host", 0, 2, 3, 5)]
    with pytest.raises(ValueError, match="away, or on its way back"):
        check_moves(PROBLEM, [*others, second])
    check_moves(PROBLEM, [*others, replace(second, store=6)])


def test_a_slot_of_another_space_or_before_a_write_is_not_valid() -> None:
    with pytest.raises(ValueError, match="nothing in host holds"):
        check_moves(PROBLEM, [Move(0, "flash", 0, 2, 3, 5), Move(0, "host", 1, None, 6, 9)])
    with pytest.raises(ValueError, match="nothing in host holds"):
        check_moves(PROBLEM, [Move(1, "host", 0, 1, 2, 4), Move(1, "host", 1, None, 5, 8)])
    with pytest.raises(ValueError, match="another move"):
        check_moves(PROBLEM, [Move(0, "host", 0, 2, 3, 4), Move(0, "host", 0, 2, 4, 5)])


def test_a_slot_lies_in_its_space_from_the_store_to_the_wait_and_always_where_a_step_relies_on_it() -> None:
    inner = occupied(PROBLEM, [Move(1, "host", 1, 5, 6, 7)])
    assert inner["host"] == [0, 0, 0, 0, 0, 30, 30, 30, 30, 0]
    assert inner["flash"] == [0] * 10
    assert occupied(PROBLEM, [Move(0, "host", 2, 10, 10, 11)])["host"] == [40, 40, *[0] * 8]
    assert (
        occupied(PROBLEM, [Move(0, "host", 2, 10, 10, 11), Move(0, "host", 0, None, 2, 5)])["host"][5] == 40
    )
    assert occupied(PROBLEM, [Move(2, "host", 0, None, 3, 6)])["host"] == [20] * 10


def test_a_space_that_is_too_small() -> None:
    small = replace(PROBLEM, spaces=(replace(HOST, bytes=49), FLASH))
    moves = [Move(2, "host", 0, None, 3, 6), Move(1, "host", 1, 5, 6, 8)]
    with pytest.raises(ValueError, match=r"host has 49 bytes; 50 are to lie there at node 5"):
        check_moves(small, moves)
    check_moves(replace(small, spaces=(replace(HOST, bytes=50), FLASH)), moves)


def test_what_leaves_is_waited_for_before_a_fetch_takes_its_memory() -> None:
    weight = Buffer(0, 40, "parameter", busy(1, 9, writes=(9,)), state=True)
    frozen = Buffer(1, 20, "parameter", busy(0, 4), state=True)
    problem = replace(PROBLEM, held=(weight, frozen))
    moves = [Move(0, "host", 0, 2, 3, 9), Move(1, "host", 0, None, 1, 3)]
    found = replay(problem, moves)
    # The store takes 4 s, of which one runs; the fetch of 2 s begins behind it, and one of them runs until its use. The
    # storage that left is fetched right where it is used.
    assert found.waits == {(0, 0): 3.0 + 4.0, (1, 0): 1.0}
    assert found.seconds == 10.0 + 8.0
    assert found.arrives[3] == 3.0 and found.starts[3] == 6.0


def test_of_two_fetches_at_one_place_the_one_that_is_used_first_goes_first() -> None:
    late = Buffer(0, 20, "parameter", busy(0, 8), state=True)
    soon = Buffer(1, 20, "parameter", busy(0, 5), state=True)
    problem = replace(PROBLEM, held=(late, soon))
    moves = [Move(0, "host", 0, None, 1, 3), Move(1, "host", 0, None, 1, 3)]
    assert replay(problem, moves).stall == 0.0
