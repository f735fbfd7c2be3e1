"""Resharding between device groups: plans executed on arrays, and their bytes."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from hyper_parallel.errors import StrategyError
from hyper_parallel.layout import Fold, Layout, Mesh
from hyper_parallel.program import DeviceGroup, ReshardPlan, plan_reshard
from hyper_parallel.program.reshard import Buffer, Transfer, cells_of, elements

PAIRS = 500
AXES = ("tensor_y", "tensor_x", "context", "shard", "replicate")
Locals = dict[int, np.ndarray]


def random_group(draw: random.Random, name: str, first: int, most: int) -> DeviceGroup:
    """A group of 1 to `most` ranks from `first` on, in any order of ranks, with one to three axes."""
    while True:
        names = draw.sample(AXES, draw.randint(1, 3))
        axes = [(axis, draw.choice((1, 2, 2, 3, 4))) for axis in names]
        world = math.prod(size for _, size in axes)
        if world <= most:
            break
    folds = {}
    if len(axes) > 1 and axes[0][1] * axes[1][1] == 4 and draw.random() < 0.5:
        over = (axes[0][0], axes[1][0])
        folds = {"expert": Fold(over, 2), "expert_shard": Fold(over, 2, 2)}
    ranks = list(range(first, first + world))
    if draw.random() < 0.3:
        draw.shuffle(ranks)
    return DeviceGroup(Mesh(*axes, folds=folds), tuple(ranks), name)


def random_layout(draw: random.Random, group: DeviceGroup, shape: tuple[int, ...]) -> Layout:
    """Axes, joints or folds on any dim, or as copies; fused parts on some dims."""
    mesh = group.mesh
    names = list(mesh.names)
    if mesh.folds and draw.random() < 0.5:
        names = ["expert", "expert_shard", *names[2:]]
    elif len(names) > 1 and draw.random() < 0.2:
        names = ["*".join(names[:2]), *names[2:]]
    draw.shuffle(names)
    layout = Layout.replicated(mesh, shape)
    for name in names:
        place = draw.choice(["copies", *range(len(shape)), *range(len(shape))])
        if place != "copies":
            dim, parts = int(place), None
            if not layout.dims[dim] and shape[dim] > 2 and draw.random() < 0.3:
                at = draw.randint(1, shape[dim] - 1)
                parts = (at, shape[dim] - at)
            layout = layout.split(dim, name, parts)
    return layout


@functools.cache
def random_pair(seed: int) -> tuple[DeviceGroup, Layout, DeviceGroup, Layout]:
    """Two groups that are apart, overlap or are the same ranks, and a layout in each."""
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 9) for _ in range(draw.choice((0, 1, 2, 2, 3))))
    source = random_group(draw, "source", 0, 12)
    first = draw.choice((len(source.ranks), len(source.ranks), len(source.ranks) // 2, 0))
    target = random_group(draw, "target", first, 12)
    return source, random_layout(draw, source, shape), target, random_layout(draw, target, shape)


@functools.cache
def random_plan(seed: int) -> ReshardPlan:
    """Of such a pair."""
    return plan_reshard(*random_pair(seed))


def scatter(group: DeviceGroup, layout: Layout, value: np.ndarray) -> Locals:
    """Local tensors of a value."""
    locals_ = {}
    for rank in group.ranks:
        here = group.coordinate(rank)
        local = np.zeros(layout.local_shape(here), dtype=np.int64)
        for box in layout.boxes(here):
            local[box.local_slices] = value[box.global_slices]
        locals_[rank] = local
    return locals_


def assemble(group: DeviceGroup, layout: Layout, locals_: Locals) -> np.ndarray:
    """The value of local tensors; asserts that copies are equal."""
    whole = np.zeros(layout.shape, dtype=np.int64)
    covered = np.zeros(layout.shape, dtype=bool)
    for rank in group.ranks:
        for box in layout.boxes(group.coordinate(rank)):
            mine, old = locals_[rank][box.local_slices], covered[box.global_slices]
            assert (whole[box.global_slices][old] == mine[old]).all(), "copies differ"
            whole[box.global_slices] = mine
            covered[box.global_slices] = True
    assert covered.all()
    return whole


def execute(plan: ReshardPlan, given: Mapping[int, np.ndarray]) -> Locals:
    """The interpreter of a plan: each phase adds boxes, read before the phase, to targets that start as zeros, so that
    what arrives twice counts twice."""
    target = {
        rank: np.zeros(plan.target_layout.local_shape(plan.target.coordinate(rank)), dtype=np.int64)
        for rank in plan.target.ranks
    }
    buffers: dict[Buffer, Mapping[int, np.ndarray]] = {Buffer.SOURCE: given, Buffer.TARGET: target}
    for phase in plan.phases:
        boxes = [buffers[phase.reads][one.sender][one.give].copy() for one in phase.transfers]
        for one, box in zip(phase.transfers, boxes, strict=True):
            target[one.receiver][one.take] += box
    return target


def moves(plan: ReshardPlan) -> Iterator[Transfer]:
    """Transfers between two ranks."""
    return (one for phase in plan.phases for one in phase.transfers if one.sender != one.receiver)


def elements_moved(plan: ReshardPlan) -> tuple[int, int]:
    """Elements over links between the groups (the two ranks are not both in one of them), and over any links."""
    groups = set(plan.source.ranks), set(plan.target.ranks)
    crossing = sum(
        one.elements
        for one in moves(plan)
        if not any(one.sender in ranks and one.receiver in ranks for ranks in groups)
    )
    return crossing, sum(one.elements for one in moves(plan))


def elements_sent(plan: ReshardPlan) -> dict[int, int]:
    """Elements that each rank sends to others."""
    sent: dict[int, int] = {}
    for one in moves(plan):
        sent[one.sender] = sent.get(one.sender, 0) + one.elements
    return sent


@pytest.mark.parametrize("block", range(5))
def test_random_pairs_give_the_global_tensor(block: int) -> None:
    for seed in range(block * PAIRS // 5, (block + 1) * PAIRS // 5):
        source, source_layout, target, target_layout = random_pair(seed)
        draw = random.Random(seed)
        plan = random_plan(seed)
        value = np.array([draw.randint(-99, 99) for _ in range(math.prod(source_layout.shape))])
        value = value.reshape(source_layout.shape)
        moved = execute(plan, scatter(source, source_layout, value))
        assert (assemble(target, target_layout, moved) == value).all(), seed


def lower_bounds(
    source: DeviceGroup, source_layout: Layout, target: DeviceGroup, target_layout: Layout
) -> tuple[int, int]:
    """Elements that have to cross between the groups, and elements that have to move at all.

    What no target rank holds and no rank of both groups takes crosses once. Every taker that lacks a box gets it once.
    """
    crossing = moved = 0
    for cell in cells_of(source, source_layout, target, target_layout):
        size, holders = elements(cell.give), set(cell.holders)
        bridged = holders & set(target.ranks) or set(cell.takers) & set(source.ranks)
        crossing += 0 if bridged else size
        moved += size * sum(rank not in holders for rank in cell.takers)
    return crossing, moved


def test_bytes_are_the_lower_bound() -> None:
    crossings = 0
    for seed in range(PAIRS):
        pair = random_pair(seed)
        plan = random_plan(seed)
        crossing, moved = lower_bounds(*pair)
        assert elements_moved(plan) == (crossing, moved), seed
        crossings += bool(crossing)
    assert crossings > PAIRS // 3


def test_each_element_comes_from_one_rank() -> None:
    """Counted by executing the plan on ones: a second copy of an element would count twice."""
    for seed in range(PAIRS):
        source, source_layout, _, _ = random_pair(seed)
        plan = random_plan(seed)
        ones = scatter(source, source_layout, np.ones(source_layout.shape, dtype=np.int64))
        assert all((local == 1).all() for local in execute(plan, ones).values()), seed


def test_copies_share_what_is_sent() -> None:
    """Of a piece with several copies none sends more than its share and one cell: the bound of list scheduling."""
    for seed in range(PAIRS):
        source, source_layout, target, target_layout = random_pair(seed)
        if set(source.ranks) & set(target.ranks):
            continue
        plan = random_plan(seed)
        sent = elements_sent(plan)
        total: dict[tuple[int, ...], int] = {}
        largest: dict[tuple[int, ...], int] = {}
        for cell in cells_of(source, source_layout, target, target_layout):
            holders = cell.holders
            total[holders] = total.get(holders, 0) + elements(cell.give)
            largest[holders] = max(largest.get(holders, 0), elements(cell.give))
        for holders, count in total.items():
            assert max(sent.get(rank, 0) for rank in holders) <= count / len(holders) + largest[holders], seed


def test_replicas_of_the_target_get_the_bytes_once_over_the_links_between_the_groups() -> None:
    source = DeviceGroup(Mesh(("shard", 2)), (0, 1), "vision")
    target = DeviceGroup(Mesh(("tensor_x", 4)), (2, 3, 4, 5), "text")
    plan = plan_reshard(
        source, Layout(source.mesh, (8, 6), (("shard",), ())), target, Layout.replicated(target.mesh, (8, 6))
    )
    assert elements_moved(plan) == (48, 4 * 48)
    assert [phase.reads for phase in plan.phases] == [Buffer.SOURCE, Buffer.TARGET]
    received = dict.fromkeys(target.ranks, 0)
    for one in plan.phases[0].transfers:
        received[one.receiver] += one.elements
    assert set(received.values()) == {12}, "each replica receives its share"


def test_large_boxes_are_shared_out_first() -> None:
    """Boxes of 1, 2 and 1 elements from two copies: each sends two."""
    source = DeviceGroup(Mesh(("replicate", 2)), (0, 1), "first")
    target = DeviceGroup(Mesh(("tensor_x", 2)), (2, 3), "second")
    goal = Layout(target.mesh, (4,), (("tensor_x",),), {0: (1, 3)})
    plan = plan_reshard(source, Layout.replicated(source.mesh, (4,)), target, goal)
    assert elements_sent(plan) == {0: 2, 1: 2}
    assert plan.phases[0].transfers[0].elements == 2


def test_one_rank_executes_its_own_transfers() -> None:
    plan = plan_reshard(*random_pair(5))
    ranks = sorted({*plan.source.ranks, *plan.target.ranks})
    count = sum(
        sum(
            1 if one.sender == one.receiver else 0.5
            for phase in plan.of(rank).phases
            for one in phase.transfers
        )
        for rank in ranks
    )
    assert count == sum(len(phase.transfers) for phase in plan.phases)


def test_layouts_that_do_not_fit_are_refused() -> None:
    group = DeviceGroup(Mesh(("shard", 2)), (0, 1), "one")
    whole = Layout.replicated(group.mesh, (4,))
    with pytest.raises(StrategyError, match="shapes differ"):
        plan_reshard(group, whole, group, Layout.replicated(group.mesh, (5,)))
    with pytest.raises(StrategyError, match="not on the mesh of one"):
        plan_reshard(group, Layout.replicated(Mesh(("shard", 3)), (4,)), group, whole)
    partial = Layout(group.mesh, (4,), ((),), {}, frozenset({"shard"}))
    with pytest.raises(StrategyError, match="a pending sum"):
        plan_reshard(group, partial, group, whole)
