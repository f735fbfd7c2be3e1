"""Several plans beside each other in one tier: what each relies on is its own, and the tier hardly grows."""

from __future__ import annotations

import functools
from itertools import pairwise

import pytest

from harness.captured import family_config, recipe_of
from harness.families import FAMILIES
from hyper_parallel.cluster import Cluster
from hyper_parallel.graph import StepGraph
from hyper_parallel.offloading import choose
from hyper_parallel.offloading.schedule import equal_graphs, offload_pass
from hyper_parallel.offloading.schedule.build_problem import build_problem
from hyper_parallel.offloading.schedule.offload_pass import Planned
from hyper_parallel.offloading.schedule.problem import OffloadTier, Rate
from hyper_parallel.offloading.schedule.slot_allocator import Shelf, SlotAllocator
from hyper_parallel.step.capture_train_step import BatchShape, capture_step

HOST = OffloadTier("host", 2**40, Rate(1e-5, 1e9), Rate(1e-5, 1e9))
CLUSTER = Cluster.named("h100")


@pytest.fixture(scope="module")
def steps() -> list[StepGraph]:
    recipe = recipe_of(FAMILIES["llama"], family_config(FAMILIES["llama"], {}, None))
    return [capture_step(recipe, BatchShape(((2, length),), (False,))) for length in (24, 28, 32)]


@pytest.fixture(scope="module")
def plans(steps: list[StepGraph]) -> list[Planned]:
    budget = max(build_problem(step, CLUSTER, 0, (HOST,)).working_set for step in steps)
    found: list[Planned] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(equal_graphs, "choose", functools.partial(choose, tries=0))  # any plan will do
        for number, step in enumerate(steps):
            shelves = found[-1].shelves if found else None
            found.append(offload_pass.planned(step, CLUSTER, int(1.1 * budget), (HOST,), shelves, number))
    return found


def _slots(shelf: Shelf, step: StepGraph) -> list[tuple[int, int, bool]]:
    """(first byte, last, whether it rests, for this step or another) of a step's slots."""
    places = shelf.places
    return [
        (places.offsets[number], places.offsets[number] + slot.bytes, number in shelf.rest.offsets)
        for number, slot in step.slots.items()
    ]


def test_three_shapes_need_about_the_memory_of_one(plans: list[Planned]) -> None:
    alone = [Shelf("host").holding(0, found.step).size for found in plans]
    together = plans[-1].places["host"].size
    assert max(alone) <= together <= 1.05 * max(alone) < 0.5 * sum(alone)


def test_what_rests_lies_apart_from_everything_and_never_moves(plans: list[Planned]) -> None:
    last = plans[-1].shelves.tiers["host"]
    resting = sorted({slot[:2] for found in plans for slot in _slots(last, found.step) if slot[2]})
    assert len(resting) > 10
    assert all(before[1] <= after[0] for before, after in pairwise(resting))
    within = [slot for found in plans for slot in _slots(last, found.step) if not slot[2]]
    assert within and min(slot[0] for slot in within) >= resting[-1][1]
    for before, after in pairwise(plans):
        old, new = (found.shelves.tiers["host"].rest.offsets for found in (before, after))
        assert {number: new[number] for number in old} == dict(old)


def test_state_has_one_slot_for_all_plans(plans: list[Planned]) -> None:
    known = plans[0].shelves.known
    again = {
        (name, tier): number
        for (name, tier), number in plans[-1].shelves.known.items()
        if (name, tier) in known
    }
    assert len(again) > 10 and again == dict(known)
    own = [{number for number, slot in found.step.slots.items() if slot.rest != "step"} for found in plans]
    assert len(own[0] & own[1] & own[2]) > 10


def test_a_plan_that_goes_takes_along_only_what_no_other_needs(plans: list[Planned]) -> None:
    shelves = plans[-1].shelves
    for gone in (2, 0, 1):
        before, shelves = shelves.tiers["host"], shelves.without(gone)
        kept = shelves.tiers["host"]
        left = {number for number in range(3) if number in kept.plans}
        wanted = {slot for at in left for slot in plans[at].step.slots}
        assert kept.places.sizes.keys() == wanted
        assert all(kept.rest.offsets[number] == before.rest.offsets[number] for number in kept.rest.offsets)
        assert kept.size <= before.size
    assert shelves.tiers["host"].size == 0 and not shelves.known


def test_the_holes_that_a_plan_leaves_are_used_again(plans: list[Planned]) -> None:
    def only(names: set[str]) -> StepGraph:
        step = plans[0].step.copy()
        storages = {
            storage
            for (name, _), number in plans[0].shelves.known.items()
            if name in names
            for storage in [plans[0].step.slots[number].storage]
        }
        step.slots = {number: slot for number, slot in step.slots.items() if slot.storage in storages}
        return step

    names = sorted({name for name, _ in plans[0].shelves.known})
    shelves = SlotAllocator.of(["host"]).holding(0, only(set(names[:4]))).holding(1, only(set(names[4:])))
    size = shelves.tiers["host"].size
    again = shelves.without(0).holding(2, only(set(names[:4])))
    assert again.tiers["host"].size == size
