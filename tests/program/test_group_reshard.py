"""Resharding between device groups: plans executed on arrays, their bytes, and their adjoint."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping

import numpy as np
import pytest

from hyper_parallel.errors import StrategyError
from hyper_parallel.layout import Fold, Layout, Mesh
from hyper_parallel.program import DeviceGroup, ReshardPlan, plan_reshard
from hyper_parallel.program.reshard import Buffer, adjoint_layout, cells_of, elements

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
    """Axes, joints or folds on any dim, as copies or partial; fused parts on some dims."""
    mesh = group.mesh
    names = list(mesh.names)
    if mesh.folds and draw.random() < 0.5:
        names = ["expert", "expert_shard", *names[2:]]
    elif len(names) > 1 and draw.random() < 0.2:
        names = ["*".join(names[:2]), *names[2:]]
    draw.shuffle(names)
    layout, partial = Layout.replicated(mesh, shape), set()
    for name in names:
        place = draw.choice(["copies", "partial", *range(len(shape)), *range(len(shape))])
        if place == "partial":
            partial.add(name)
        elif place != "copies":
            dim, parts = int(place), None
            if not layout.dims[dim] and shape[dim] > 2 and draw.random() < 0.3:
                at = draw.randint(1, shape[dim] - 1)
                parts = (at, shape[dim] - at)
            layout = layout.split(dim, name, parts)
    return Layout(mesh, shape, layout.dims, layout.parts, frozenset(partial))


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


def scatter(group: DeviceGroup, layout: Layout, value: np.ndarray, draw: random.Random) -> Locals:
    """Local tensors of a value: copies are equal, partial sums are random and add up to it."""
    partial = sorted(layout.partial)
    parts: dict[tuple[int, ...], np.ndarray] = {}
    indices = list(np.ndindex(*(layout.mesh.size(axis) for axis in partial)))
    rest = value.copy()
    for index in indices[1:]:
        parts[index] = np.array([draw.randint(-9, 9) for _ in range(value.size)]).reshape(value.shape)
        rest = rest - parts[index]
    parts[indices[0]] = rest
    locals_ = {}
    for rank in group.ranks:
        here = group.coordinate(rank)
        whole = parts[tuple(layout.mesh.index(axis, here) for axis in partial)]
        local = np.zeros(layout.local_shape(here), dtype=np.int64)
        for box in layout.boxes(here):
            local[box.local_slices] = whole[box.global_slices]
        locals_[rank] = local
    return locals_


def assemble(group: DeviceGroup, layout: Layout, locals_: Locals) -> np.ndarray:
    """The value of local tensors; asserts that copies are equal."""
    parts: dict[tuple[int, ...], np.ndarray] = {}
    partial = sorted(layout.partial)
    seen: dict[tuple[int, ...], np.ndarray] = {}
    for rank in group.ranks:
        here = group.coordinate(rank)
        part = tuple(layout.mesh.index(axis, here) for axis in partial)
        whole = parts.setdefault(part, np.zeros(layout.shape, dtype=np.int64))
        covered = seen.setdefault(part, np.zeros(layout.shape, dtype=bool))
        for box in layout.boxes(here):
            mine = locals_[rank][box.local_slices]
            old = covered[box.global_slices]
            assert (whole[box.global_slices][old] == mine[old]).all(), "copies differ"
            whole[box.global_slices] = mine
            covered[box.global_slices] = True
    assert all(covered.all() for covered in seen.values())
    return sum(parts.values(), np.zeros(layout.shape, dtype=np.int64))


def execute(plan: ReshardPlan, given: Mapping[int, np.ndarray], dtype: type = np.int64) -> Locals:
    """The interpreter of a plan: each phase adds boxes, read before the phase, to buffers that start as zeros."""
    buffers: dict[Buffer, Locals] = {}
    for buffer, group, layout in (
        (Buffer.SOURCE, plan.source, plan.source_layout),
        (Buffer.SUM, plan.source, plan.source_layout),
        (Buffer.TARGET, plan.target, plan.target_layout),
    ):
        buffers[buffer] = {
            rank: np.zeros(layout.local_shape(group.coordinate(rank)), dtype=dtype) for rank in group.ranks
        }
    first, last = Buffer.SOURCE, Buffer.TARGET
    if plan.is_transposed:
        first, last = last, first
    buffers[first] = {rank: local.copy() for rank, local in given.items()}
    for phase in plan.phases:
        boxes = [buffers[phase.reads][one.sender][one.give].copy() for one in phase.transfers]
        for one, box in zip(phase.transfers, boxes, strict=True):
            buffers[phase.writes][one.receiver][one.take] += box
    return buffers[last]


@pytest.mark.parametrize("block", range(5))
def test_random_pairs_give_the_global_tensor_and_the_adjoint(block: int) -> None:
    for seed in range(block * PAIRS // 5, (block + 1) * PAIRS // 5):
        source, source_layout, target, target_layout = random_pair(seed)
        draw = random.Random(seed)
        plan = random_plan(seed)
        value = np.array([draw.randint(-99, 99) for _ in range(math.prod(source_layout.shape))])
        value = value.reshape(source_layout.shape)
        x = scatter(source, source_layout, value, draw)
        moved = execute(plan, x)
        assert (assemble(target, target_layout, moved) == value).all(), seed
        # The adjoint, on integers: exact.
        y = {rank: np.array([draw.randint(-9, 9) for _ in range(moved[rank].size)]) for rank in target.ranks}
        y = {rank: one.reshape(moved[rank].shape) for rank, one in y.items()}
        back = execute(plan.transposed(), y)
        left = sum(int((moved[rank] * y[rank]).sum()) for rank in target.ranks)
        right = sum(int((x[rank] * back[rank]).sum()) for rank in source.ranks)
        assert left == right, seed
        for there, again in zip(plan.phases, plan.transposed().transposed().phases, strict=True):
            assert (there.reads, there.writes) == (again.reads, again.writes)
            assert sorted(map(repr, there.transfers)) == sorted(map(repr, again.transfers))


def lower_bounds(
    source: DeviceGroup, source_layout: Layout, target: DeviceGroup, target_layout: Layout
) -> tuple[int, int]:
    """Elements that have to cross between the groups, and elements that have to move at all.

    What no target rank holds and no rank of both groups takes crosses once. Every taker that lacks a box gets it once;
    parts of a sum move once each to where they are added.
    """
    crossing = moved = 0
    for cell in cells_of(source, source_layout, target, target_layout):
        size = elements(cell.give)
        anyone = {rank for copies in cell.holders for rank in copies}
        near = anyone & set(target.ranks)
        bridged = near or set(cell.takers) & set(source.ranks)
        crossing += 0 if bridged else size
        if len(cell.holders) == 1:
            moved += size * sum(rank not in anyone for rank in cell.takers)
        else:
            moved += size * (len(cell.holders) - 1)
            moved += size * (len(cell.takers) - bool(set(cell.takers) & anyone))
    return crossing, moved


def test_bytes_are_the_lower_bound() -> None:
    crossings = 0
    for seed in range(PAIRS):
        pair = random_pair(seed)
        plan = random_plan(seed)
        crossing, moved = lower_bounds(*pair)
        assert (plan.crossing(), plan.moved()) == (crossing, moved), seed
        crossings += bool(crossing)
    assert crossings > PAIRS // 3


def test_each_element_comes_from_one_rank() -> None:
    """Counted by executing the plan on ones: a second copy of an element would count twice."""
    for seed in range(PAIRS):
        source, source_layout, _, target_layout = random_pair(seed)
        if source_layout.partial or target_layout.partial:
            continue
        plan = random_plan(seed)
        ones = scatter(source, source_layout, np.ones(source_layout.shape, dtype=np.int64), random.Random(0))
        assert all((local == 1).all() for local in execute(plan, ones).values()), seed


def test_copies_share_what_is_sent() -> None:
    """Of a piece with several copies none sends more than its share and one cell: the bound of list scheduling."""
    for seed in range(PAIRS):
        source, source_layout, target, target_layout = random_pair(seed)
        if source_layout.partial or set(source.ranks) & set(target.ranks):
            continue
        plan = random_plan(seed)
        sent = plan.sent()
        total: dict[tuple[int, ...], int] = {}
        largest: dict[tuple[int, ...], int] = {}
        for cell in cells_of(source, source_layout, target, target_layout):
            (holders,) = cell.holders
            total[holders] = total.get(holders, 0) + elements(cell.give)
            largest[holders] = max(largest.get(holders, 0), elements(cell.give))
        for holders, count in total.items():
            assert max(sent.get(rank, 0) for rank in holders) <= count / len(holders) + largest[holders], seed


def test_the_adjoint_is_the_plan_between_adjoint_layouts() -> None:
    """The transposed plan's gradients have the layouts that `adjoint_layout` says: their sums agree."""
    compared = 0
    for seed in range(PAIRS):
        source, source_layout, target, target_layout = random_pair(seed)
        if target_layout.partial:
            continue
        plan = random_plan(seed)
        try:
            of_target, of_source = adjoint_layout(target_layout), adjoint_layout(source_layout)
        except StrategyError:
            continue
        draw = random.Random(seed)
        value = np.array([draw.randint(-9, 9) for _ in range(math.prod(source_layout.shape))])
        y = scatter(target, of_target, value.reshape(source_layout.shape), draw)
        forward = execute(plan_reshard(target, of_target, source, of_source), y)
        assert (assemble(source, of_source, forward) == value.reshape(source_layout.shape)).all(), seed
        if not source_layout.partial:
            back = execute(plan.transposed(), y)
            assert (assemble(source, of_source, back) == value.reshape(source_layout.shape)).all(), seed
            compared += 1
    assert compared > PAIRS // 5


def test_replicas_of_the_target_get_the_bytes_once_over_the_links_between_the_groups() -> None:
    source = DeviceGroup(Mesh(("shard", 2)), (0, 1), "vision")
    target = DeviceGroup(Mesh(("tensor_x", 4)), (2, 3, 4, 5), "text")
    plan = plan_reshard(
        source, Layout(source.mesh, (8, 6), (("shard",), ())), target, Layout.replicated(target.mesh, (8, 6))
    )
    assert plan.crossing() == 48
    assert plan.moved() == 4 * 48
    assert [phase.writes for phase in plan.phases] == [Buffer.TARGET, Buffer.TARGET]
    received = dict.fromkeys(target.ranks, 0)
    for one in plan.phases[0].transfers:
        received[one.receiver] += one.elements
    assert set(received.values()) == {12}, "each replica receives its share"


def test_partial_sums_are_added_in_the_source_group_in_the_order_of_the_parts() -> None:
    source = DeviceGroup(Mesh(("tensor_x", 3)), (0, 1, 2), "first")
    target = DeviceGroup(Mesh(("tensor_x", 2)), (3, 4), "second")
    layout = Layout(source.mesh, (6,), ((),), {}, frozenset({"tensor_x"}))
    plan = plan_reshard(source, layout, target, Layout(target.mesh, (6,), (("tensor_x",),)))
    assert plan.crossing() == 6
    by_chunk: dict[tuple[int, int], list[int]] = {}
    for one in plan.phases[0].transfers:
        by_chunk.setdefault((one.receiver, one.take[0].start), []).append(one.sender)
    assert all(senders == [0, 1, 2] for senders in by_chunk.values())
    assert len({receiver for receiver, _ in by_chunk}) == 2, "the sums are shared out"


def test_large_boxes_are_shared_out_first() -> None:
    """Boxes of 1, 2 and 1 elements from two copies: each sends two."""
    source = DeviceGroup(Mesh(("replicate", 2)), (0, 1), "first")
    target = DeviceGroup(Mesh(("tensor_x", 2)), (2, 3), "second")
    goal = Layout(target.mesh, (4,), (("tensor_x",),), {0: (1, 3)})
    plan = plan_reshard(source, Layout.replicated(source.mesh, (4,)), target, goal)
    assert plan.sent() == {0: 2, 1: 2}
    assert plan.phases[0].transfers[0].elements == 2


def test_adjoint_layouts() -> None:
    mesh = Mesh(("shard", 2), ("tensor_x", 4))
    adjoint = adjoint_layout(Layout(mesh, (8,), ((),), {}, frozenset({"tensor_x"})))
    assert str(adjoint) == "[8]+shard", "copies become parts, parts become copies"
    folds = {"expert": Fold(("shard", "tensor_x"), 4), "expert_shard": Fold(("shard", "tensor_x"), 2, 4)}
    folded = Layout(Mesh(*mesh.axes, folds=folds), (8,), (("expert",),))
    assert str(adjoint_layout(folded)) == "[8/expert]+expert_shard"
    alone = Mesh(*mesh.axes, folds={"expert": folds["expert"]})
    with pytest.raises(StrategyError, match="lie along no named axes"):
        adjoint_layout(Layout(alone, (8,), (("expert",),)))


def test_sums_have_the_same_bits_in_any_target() -> None:
    """Parts are added one after the other in the order of the partial axis, wherever their sum is needed."""
    source = DeviceGroup(Mesh(("shard", 2), ("tensor_x", 3)), tuple(range(6)), "first")
    layout = Layout(source.mesh, (7,), (("shard",),), {}, frozenset({"tensor_x"}))
    draw = random.Random(0)
    x = {
        rank: np.array([draw.uniform(-1, 1) * 10 ** draw.randint(-6, 6) for _ in range(n)], dtype=np.float32)
        for rank, n in enumerate((4, 4, 4, 3, 3, 3))
    }
    expected = np.concatenate([(x[0] + x[1]) + x[2], (x[3] + x[4]) + x[5]])
    for first, axes in ((6, (("shard", 5),)), (0, (("shard", 2), ("tensor_x", 3))), (3, (("shard", 2),))):
        mesh = Mesh(*axes)
        target = DeviceGroup(mesh, tuple(range(first, first + mesh.world)), "second")
        for dims in ((), ("shard",)):
            goal = Layout(mesh, (7,), (dims,))
            moved = execute(plan_reshard(source, layout, target, goal), x, np.float32)
            for rank in target.ranks:
                for box in goal.boxes(target.coordinate(rank)):
                    assert (moved[rank][box.local_slices] == expected[box.global_slices]).all()


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
