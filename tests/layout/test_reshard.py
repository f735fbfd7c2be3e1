"""Layouts in motion: any becomes any other."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import run_ranks
from hyper_parallel.compat import collectives
from hyper_parallel.compat.local_tensor import each_rank, one_device, per_rank, simulated_ranks
from hyper_parallel.errors import StrategyError
from hyper_parallel.layout import Fold, Layout, Mesh
from hyper_parallel.layout.layout import transfers
from hyper_parallel.shard.reshard import cut, reshard

WORLD = 8
MESHES = [
    Mesh(("a", 2), ("b", 2), ("c", 2)),
    Mesh(("a", 4), ("b", 2), folds={"f": Fold(("a", "b"), 4), "g": Fold(("a", "b"), 2, 4)}),
    Mesh(("a", 2), ("b", 4), folds={"f": Fold(("a", "b"), 2), "g": Fold(("a", "b"), 4, 2)}),
    Mesh(
        ("a", 8),
    ),
]
fast = settings(max_examples=60, deadline=None)


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> Layout:
    """A layout on 8 ranks."""
    mesh = draw(st.sampled_from(MESHES))
    names = list(mesh.names)
    if mesh.folds and draw(st.booleans()):
        names = ["f", "g"]
    if len(names) > 1 and draw(st.booleans()):
        names = (
            [f"{names[1]}*{names[0]}", *names[2:]]
            if draw(st.booleans())
            else ["*".join(names[:2]), *names[2:]]
        )
    layout, partial = Layout.replicated(mesh, shape), set()
    for name in draw(st.permutations(names)):
        place = draw(st.integers(-2, len(shape) - 1))
        if place == -2:
            partial.add(name)
        elif place >= 0:
            parts = None
            if not layout.dims[place] and shape[place] > 1 and draw(st.booleans()):
                at = draw(st.integers(1, shape[place] - 1))
                parts = (at, shape[place] - at)
            layout = layout.split(place, name, parts)
    layout = Layout(mesh, shape, layout.dims, layout.parts, frozenset(partial))
    if not shape or 0 in layout.parts or draw(st.booleans()):
        return layout
    return layout.ordered(0, tuple(draw(st.permutations(range(shape[0])))))


shapes = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)


def _pieces(layout: Layout, whole: torch.Tensor) -> torch.Tensor:
    """Each rank's piece of a tensor; of a partial one, parts that add up to it."""

    axes = sorted(layout.partial)
    count = math.prod(layout.mesh.size(axis) for axis in axes)

    def make(rank: int) -> torch.Tensor:
        coordinate, part = layout.mesh.coordinate(rank), 0
        for axis in axes:
            part = part * layout.mesh.size(axis) + layout.mesh.index(axis, coordinate)
        piece = cut(whole, layout, layout.mesh.coordinate(rank))
        return piece - sum(range(count)) if part == 0 else torch.full_like(piece, part)

    return per_rank(make)


def _value(layout: Layout, local: torch.Tensor) -> torch.Tensor:
    """The whole tensor that all ranks' pieces mean, by adding up every copy and dividing by their number."""
    total = torch.zeros(layout.shape, dtype=torch.float64)
    for rank, piece in each_rank(local).items():
        with one_device():
            for box in layout.boxes(layout.mesh.coordinate(rank)):
                total[box.global_slices] += piece[box.local_slices]
    return total / (layout.copies / math.prod(layout.mesh.size(axis) for axis in layout.partial))


@fast
@given(st.data())
def test_any_layout_becomes_any_other(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    source, target = data.draw(layouts(shape)), data.draw(layouts(shape))
    whole = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    with simulated_ranks(WORLD):
        local = _pieces(source, whole)
        moved = reshard(local, source, target)
        for rank, piece in each_rank(moved).items():
            with one_device():
                coordinate = target.mesh.coordinate(rank)
                expected = cut(whole, target, target.mesh.coordinate(rank))
                if any(target.mesh.index(axis, coordinate) for axis in target.partial):
                    expected = torch.zeros_like(expected)
                assert torch.equal(piece, expected)
        # And back: the value is the same, wherever the parts of a partial source lie.
        assert torch.equal(_value(source, reshard(moved, target, source)), whole)


@given(st.data())
def test_each_element_comes_once_and_from_the_rank_itself_if_it_has_it(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    source, target = data.draw(layouts(shape)), data.draw(layouts(shape))
    parts = math.prod(source.mesh.size(axis) for axis in source.partial)
    taken = [torch.zeros(target.local_shape(target.mesh.coordinate(rank))) for rank in range(WORLD)]
    for one in transfers(source, target):
        taken[one.receiver][one.take] += 1
    for rank, counts in enumerate(taken):
        at_zero = not any(target.mesh.index(a, target.mesh.coordinate(rank)) for a in target.partial)
        assert bool((counts == (parts if at_zero else 0)).all())
    if source == target and not source.partial:
        assert all(one.sender == one.receiver for one in transfers(source, target))


def _moves(rank: int, world: int) -> torch.Tensor:
    source = Layout(MESHES[0], (7, 5), (("b", "a"), ()), partial=frozenset({"c"}))
    target = Layout(MESHES[1], (7, 5), ((), ("f",)))
    whole = torch.arange(35.0, dtype=torch.float64).reshape(7, 5)
    moved = reshard(_pieces(source, whole), source, target)
    assert torch.equal(moved, cut(whole, target, target.mesh.coordinate(rank)))
    return moved


def test_real_ranks_move_what_simulated_ones_do() -> None:
    assert len(run_ranks(_moves, WORLD)) == WORLD


def test_only_what_is_missing_travels() -> None:
    mesh = MESHES[0]
    split = Layout(mesh, (8, 4), (("a", "b", "c"), ()))
    with simulated_ranks(WORLD):
        local = _pieces(split, torch.zeros(8, 4))
        with collectives.counting() as counted:
            reshard(local, split, split.without("c"))
    (call,) = counted
    assert call.bytes_received == 4 * 4  # one row of float32 from the neighbour
    with pytest.raises(StrategyError, match="one shape over the same ranks"):
        transfers(split, Layout.replicated(mesh, (8, 5)))
