"""The Layout algebra: every element lies where it should, as often as it should, and text says it exactly."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.compat.local_tensor import each_rank, on_rank, one_device, per_rank, simulated_ranks
from hyper_parallel.layout import Fold, Layout, Mesh
from hyper_parallel.layout.layout import chunk
from hyper_parallel.shard.mesh_axis import Axis
from hyper_parallel.shard.process_mesh import ProcessMesh
from hyper_parallel.shard.reshard import cut
from hyper_parallel.strategy import AXIS_NAMES, Strategy


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Up to three dims, uneven and empty chunks, several axes on one dim, fused parts, orders, partial axes."""
    order = draw(st.permutations(AXIS_NAMES))[:3]
    mesh = Mesh(*((axis, draw(st.integers(1, 3))) for axis in order))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    layout = Layout.replicated(mesh, shape)
    partial = set()
    for axis in draw(st.permutations(order)):
        place = draw(st.integers(-2, len(shape) - 1))
        if place == -2:
            partial.add(axis)
        elif place >= 0:
            fused = None
            if not layout.dims[place] and draw(st.booleans()) and shape[place] > 1:
                at = draw(st.integers(1, shape[place] - 1))
                fused = (at, shape[place] - at)
            layout = layout.split(place, axis, fused)
    layout = Layout(mesh, shape, layout.dims, layout.parts, frozenset(partial))
    at = draw(st.integers(0, len(shape) - 1))
    if at in layout.parts or draw(st.booleans()):
        return layout
    return layout.ordered(at, tuple(draw(st.permutations(range(shape[at])))))


@given(layouts())
def test_text_says_all_of_it(layout: Layout) -> None:
    assert Layout.parse(str(layout), layout.mesh) == layout


@given(layouts())
def test_every_element_is_held_by_as_many_ranks_as_there_are_copies(layout: Layout) -> None:
    held = torch.zeros(layout.shape, dtype=torch.int64)
    for rank in range(layout.mesh.world):
        for box in layout.boxes(layout.mesh.coordinate(rank)):
            held[box.global_slices] += 1
    assert bool((held == layout.copies).all())


@given(layouts())
def test_boxes_fill_the_local_tensor_exactly_once(layout: Layout) -> None:
    for rank in range(layout.mesh.world):
        coordinate = layout.mesh.coordinate(rank)
        local = torch.zeros(layout.local_shape(coordinate), dtype=torch.int64)
        for box in layout.boxes(coordinate):
            local[box.local_slices] += 1
        assert bool((local == 1).all())


@given(layouts(), layouts())
def test_any_layout_can_be_made_from_any_other_by_intersecting_boxes(one: Layout, other: Layout) -> None:
    other = Layout.replicated(other.mesh, one.shape).ordered(0, tuple(range(one.shape[0]))[::-1])
    for axis in other.mesh.names:
        if axis not in other.split_axes:
            other = other.split(0, axis)
    whole = torch.arange(math.prod(one.shape)).reshape(one.shape)
    for rank in range(other.mesh.world):
        coordinate = other.mesh.coordinate(rank)
        local = torch.full(other.local_shape(coordinate), -1)
        for source in range(one.mesh.world):
            piece = cut(whole, one, one.mesh.coordinate(source))
            for mine in other.boxes(coordinate):
                for theirs in one.boxes(one.mesh.coordinate(source)):
                    common = mine.intersect(theirs)
                    if common is not None:
                        local[common[0]] = piece[common[1]]
        assert torch.equal(local, cut(whole, other, other.mesh.coordinate(rank)))


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunks_are_torchs(length: int, count: int) -> None:
    ours = [range(*chunk(length, count, index)) for index in range(count)]
    theirs = torch.arange(length).chunk(count) if length else ()
    assert [list(c) for c in ours if len(c)] == [c.tolist() for c in theirs]


@given(st.permutations(AXIS_NAMES), st.tuples(*[st.integers(1, 3)] * len(AXIS_NAMES)))
def test_ranks_and_coordinates_are_one_to_one(order: list[str], sizes: tuple[int, ...]) -> None:
    mesh = Mesh(*zip(order, sizes, strict=True))
    assert [mesh.rank(mesh.coordinate(rank)) for rank in range(mesh.world)] == list(range(mesh.world))
    for axis in order:
        peers = list(mesh.peers(mesh.world - 1, (axis,)))
        assert len(peers) == mesh.size(axis)
        assert peers[-1] == mesh.world - 1


@pytest.mark.parametrize("text", ["4096/tensor", "[4096/tensor", "", "[x]"])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Layout.parse(text, Mesh(("tensor", 2)))


@pytest.mark.parametrize("order", [("shard", "tensor"), ("tensor", "shard")])
def test_moves_along_an_axis_are_each_others_inverse_and_transpose(order: tuple[str, str]) -> None:
    """For each map A and its backward B: <A x, y> summed over ranks equals <x, B y>, uneven lengths included."""
    strategy = Strategy(axes=dict.fromkeys(order, 2))
    mesh = Mesh.of(strategy)
    for length in (4, 5, 1):
        with simulated_ranks(4):
            axis = ProcessMesh.of(mesh)["tensor_x"]
            whole = per_rank(lambda rank, n=length: torch.arange(3.0 * n).reshape(3, n) + 100 * rank)
            part = axis.split(whole, 1)
            for rank, tensor in each_rank(axis.gather(part, 1, length)).items():
                first, second = (on_rank(whole, peer) for peer in mesh.peers(rank, ("tensor_x",)))
                with one_device():
                    a, b = axis.interval(length, next(iter(mesh.peers(rank, ("tensor_x",)))))
                    assert torch.equal(tensor[:, a:b], first[:, a:b])
                    assert torch.equal(tensor[:, b:], second[:, b:])
            for name, source in (
                ("copy", whole),
                ("reduce", whole),
                ("split", whole),
                ("gather", part),
                ("gather_sum", part),
                ("reduce_split", whole),
            ):
                _check_transpose(axis, name, source, length)


def _check_transpose(axis: Axis, name: str, source: torch.Tensor, length: int) -> None:
    x = source.detach().clone().requires_grad_()
    extra = (1, length) if name in ("gather", "gather_sum") else (1,) if "split" in name else ()
    y = getattr(axis, name)(x, *extra)
    weight = per_rank(lambda rank: torch.ones(on_rank(y, rank).shape) * 2.0)
    y.backward(weight)
    assert x.grad is not None
    for rank, gradient in each_rank(x.grad).items():
        with one_device():
            # Where the output differs between ranks (or is a sum), both ranks' weights reach the input.
            expected = {"copy": 4.0, "gather_sum": 4.0}.get(name, 2.0)
            assert gradient.shape == on_rank(source, rank).shape
            assert bool((gradient == expected).all()), (name, rank, gradient)


@pytest.mark.parametrize(
    "joint", [("x",), ("z",), ("x", "z"), ("x", "y"), ("y", "z"), ("x", "y", "z"), ("x", "outer")]
)
def test_ranks_of_a_joint_of_folds_differ_in_these_folds_only(joint: tuple[str, ...]) -> None:
    over = ("a", "b")
    folds = {"x": Fold(over, 2), "y": Fold(over, 3, stride=2), "z": Fold(over, 2, stride=6)}
    mesh = Mesh(("outer", 2), ("a", 4), ("b", 3), folds=folds)
    seen = {
        rank: tuple(
            mesh.index(name, mesh.coordinate(rank)) for name in ("outer", *folds) if name not in joint
        )
        for rank in range(mesh.world)
    }
    expected = {tuple(rank for rank in seen if seen[rank] == key) for key in seen.values()}
    assert set(mesh.groups("*".join(joint))) == expected
