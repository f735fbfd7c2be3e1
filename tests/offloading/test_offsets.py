"""Offsets in an arena: what lives at once never overlaps, and the arena is hardly larger than what is alive."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.captured import family_config, micro_batches, recipe_of, shape_of
from harness.equivalence import draw_batch
from harness.families import FAMILIES
from harness.memory_problems import SMALL, llama
from hyper_parallel.graph import lifetimes
from hyper_parallel.offloading.schedule.slot_allocator import Packed, pack
from hyper_parallel.step.capture_train_step import capture_step

Life = tuple[int, int, int]
LIVES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 300)), max_size=25)


def alive(life: Life, place: int) -> bool:
    first, last, _ = life
    return first <= place <= last if first <= last else place >= first or place <= last


def check(lives: list[Life], align: int) -> Packed:
    """Nothing that is alive at one place overlaps, and the arena is as large as is said."""
    packed = pack(lives, align)
    end = 1 + max((max(life[:2]) for life in lives), default=0)
    rounded = [(size + align - 1) // align * align for _, _, size in lives]
    for one, other in combinations(range(len(lives)), 2):
        if not rounded[one] or not rounded[other]:
            continue
        apart = (
            packed.offsets[one] + rounded[one] <= packed.offsets[other]
            or packed.offsets[other] + rounded[other] <= packed.offsets[one]
        )
        together = any(alive(lives[one], at) and alive(lives[other], at) for at in range(end))
        assert apart or not together, (lives[one], lives[other])
    assert all(offset % align == 0 and offset >= 0 for offset in packed.offsets)
    tops = [offset + size for offset, size in zip(packed.offsets, rounded, strict=True)]
    assert packed.size == max(tops, default=0)
    peaks = [
        sum(size for life, size in zip(lives, rounded, strict=True) if alive(life, at)) for at in range(end)
    ]
    assert packed.peak == max(peaks) <= packed.size
    return packed


@settings(max_examples=60, deadline=None)
@given(LIVES, st.sampled_from((1, 16, 512)))
def test_what_lives_at_once_never_overlaps(lives: list[Life], align: int) -> None:
    assert check(lives, align) == pack(lives, align)


def test_a_stack_is_packed_without_a_gap() -> None:
    # As forward and backward: what comes first goes last, with a temporary at each node.
    draw = random.Random(0)
    stack = [(at, 199 - at, draw.randrange(1, 10**6)) for at in range(100)]
    passing = [(at, at, draw.randrange(1, 10**5)) for at in range(200)]
    packed = pack(stack + passing)
    assert packed.size == packed.peak


def test_what_goes_around_the_end_meets_both_sides() -> None:
    packed = check([(8, 1, 100), (0, 1, 100), (9, 9, 100), (2, 7, 200)], 1)
    assert packed.size == 200
    assert check([(5, 4, 10), (3, 2, 10)], 1).size == 20


def test_one_greedy_pass_is_not_enough() -> None:
    # In each of the orders as they are first tried, something sticks out.
    lives = [(0, 2, 2), (1, 3, 4), (2, 3, 1), (3, 4, 2), (3, 5, 1), (4, 6, 2), (6, 7, 5)]
    assert check(lives, 1).size == 8


def test_nothing_and_nonsense() -> None:
    assert pack([]) == Packed((), 0, 0)
    assert pack([(0, 3, 0)]) == Packed((0,), 0, 0)
    with pytest.raises(ValueError, match="alignment of 0"):
        pack([(0, 1, 5)], 0)
    with pytest.raises(ValueError, match="negative"):
        pack([(0, 1, -5)])


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_step_shaped_like_a_llama(seed: int | None) -> None:
    problem = llama(SMALL, seed=seed)
    lives = [
        (0, problem.nodes - 1, held.bytes)
        if held.state
        else (held.busy[0].first, held.busy[-1].last, held.bytes)
        for held in problem.held
    ]
    packed = pack(lives)
    assert packed.size <= 1.02 * packed.peak


@pytest.mark.parametrize("family", ["llama", "deepseek-v3"])
def test_a_captured_step(family: str) -> None:
    fields = FAMILIES[family]
    config = family_config(fields, {}, None)
    recipe = recipe_of(fields, config)
    step = capture_step(recipe, shape_of(micro_batches(recipe.handle, config, draw_batch(fields)), True))
    nodes = sum(1 for _ in step.nodes)
    lives = [(max(0, life.born), min(life.died, nodes - 1), life.bytes) for life in lifetimes(step)]
    packed = pack(lives, 64)
    assert packed.size <= 1.02 * packed.peak
