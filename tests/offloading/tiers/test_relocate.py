"""Pieces that change places in one memory arrive whole, whatever lies where others go."""

from __future__ import annotations

import random

import pytest

from hyper_parallel.offloading.tiers.slots import Shift, ordered


def places(draw: random.Random, counts: list[int]) -> list[int]:
    """Offsets of pieces that do not overlap, in a random order and with random gaps."""
    at, found = 0, [0] * len(counts)
    for index in draw.sample(range(len(counts)), len(counts)):
        at += draw.choice((0, 0, 1, 5))
        found[index] = at
        at += counts[index]
    return found


@pytest.mark.parametrize("seed", range(200))
def test_every_piece_arrives(seed: int) -> None:
    draw = random.Random(seed)
    counts = [draw.randrange(12) for _ in range(draw.randrange(1, 12))]
    shifts = [Shift(*one) for one in zip(places(draw, counts), places(draw, counts), counts, strict=True)]
    memory = bytearray(draw.randbytes(200))
    before, aside = bytes(memory), {}
    for step, shift in ordered(shifts):
        source = slice(shift.source, shift.source + shift.bytes)
        target = slice(shift.target, shift.target + shift.bytes)
        if step == "aside":
            aside[shift] = memory[source]
        else:
            memory[target] = aside.pop(shift) if step == "back" else memory[source]
    assert not aside
    for shift in shifts:
        there = memory[shift.target : shift.target + shift.bytes]
        assert there == before[shift.source : shift.source + shift.bytes]


def test_nothing_is_put_aside_without_a_circle() -> None:
    steps = ordered([Shift(0, 10, 10), Shift(10, 20, 10), Shift(20, 35, 10), Shift(50, 0, 10)])
    assert [(step, shift.source) for step, shift in steps] == [
        ("copy", 20),
        ("copy", 10),
        ("copy", 0),
        ("copy", 50),
    ]


def test_of_a_circle_the_smallest_waits_aside() -> None:
    steps = ordered([Shift(0, 5, 10), Shift(10, 0, 4)])
    assert [(step, shift.bytes) for step, shift in steps] == [("aside", 4), ("copy", 10), ("back", 4)]
