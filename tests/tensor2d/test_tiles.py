"""One collective that gathers several dims at once gives the tensor that the tiles were cut from."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel.compat.local_tensor import each_rank, one_device, per_rank, simulated_ranks
from hyper_parallel.layout import Layout, Mesh
from hyper_parallel.shard.axis import Axis, MeshAxes
from hyper_parallel.shard.groups import Groups
from hyper_parallel.shard.handle import cut
from hyper_parallel.shard.tensor2d.heads import ScatterHeads
from hyper_parallel.shard.tensor2d.nouns import digit, part_of_x, with_digits
from hyper_parallel.shard.tensor2d.tiles import Tiles

Y_OUTER = (("shard", 2), ("tensor_y", 2), ("tensor_x", 4))
X_OUTER = (("tensor_x", 4), ("shard", 2), ("tensor_y", 2))
PARTS = {
    "residual to whole": (("tensor_y", 1), ("tensor_x", 2)),
    "digits on two dims": ((digit(2, 2), 1), (digit(2, 1), 2)),
    "y and the inner digit": (("tensor_y", 1), (digit(2, 1), 2)),
    "two parts of one dim": (("tensor_y", 1), (digit(2, 2), 1), (digit(2, 1), 2)),
    "one part": (("tensor_y", 1),),
}


def _axes(declared: tuple[tuple[str, int], ...]) -> MeshAxes:
    mesh = with_digits(Mesh(*declared))
    return MeshAxes(mesh, Groups(mesh))


@pytest.mark.parametrize("declared", [Y_OUTER, X_OUTER], ids=["y outer", "x outer"])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS.keys())
def test_gather_and_its_transpose(
    declared: tuple[tuple[str, int], ...], parts: tuple[tuple[str, int], ...]
) -> None:
    whole = torch.arange(3 * 8 * 8, dtype=torch.float64).reshape(3, 8, 8)
    with simulated_ranks(16):
        axes = _axes(declared)
        tiles = Tiles.of(parts, axes)
        layout = Layout.replicated(axes.mesh, (3, 8, 8))
        for name, dim in parts:
            layout = layout.split(dim, name)
        mine = per_rank(lambda rank: cut(whole, layout, rank)).requires_grad_()
        gathered = tiles.gather_sum(mine)
        with one_device():
            assert all(torch.equal(copy, whole) for copy in each_rank(gathered.detach()).values())
        # Each rank's use of the whole weighs it by its rank: the gradient is the sum over the joint's ranks.
        weight = per_rank(lambda rank: whole * (1 + rank))
        (gathered * weight).sum().backward()
        assert mine.grad is not None
        with one_device():
            for rank, gradient in each_rank(mine.grad).items():
                group = next(ranks for ranks in axes.mesh.groups(tiles.axis.name) if rank in ranks)
                assert torch.equal(gradient, cut(whole, layout, rank) * sum(1 + other for other in group))


@pytest.mark.parametrize("declared", [Y_OUTER, X_OUTER], ids=["y outer", "x outer"])
def test_reduce_split_is_the_tile_of_the_sum(declared: tuple[tuple[str, int], ...]) -> None:
    whole = torch.arange(3 * 8 * 8, dtype=torch.float64).reshape(3, 8, 8)
    parts = (("tensor_y", 1), ("tensor_x", 2))
    with simulated_ranks(16):
        axes = _axes(declared)
        tiles = Tiles.of(parts, axes)
        layout = Layout.replicated(axes.mesh, (3, 8, 8)).split(1, "tensor_y").split(2, "tensor_x")
        part = per_rank(lambda rank: whole * (1 + rank)).requires_grad_()
        mine = tiles.reduce_split(part)
        mine.sum().backward()
        assert part.grad is not None
        with one_device():
            for rank, tile in each_rank(mine.detach()).items():
                group = next(ranks for ranks in axes.mesh.groups(tiles.axis.name) if rank in ranks)
                assert torch.equal(tile, cut(whole, layout, rank) * sum(1 + other for other in group))
            assert all(torch.equal(g, torch.ones_like(g)) for g in each_rank(part.grad).values())


@pytest.mark.parametrize(
    ("counts", "shared", "sharing"),
    [
        ((8,), (False,), 1),
        ((8, 4, 4), (False, False, False), 1),
        ((2,), (True,), 2),
        ((1,), (True,), 4),
        ((8, 2, 2), (False, True, True), 2),
    ],
    ids=["query", "fused", "two ranks to a head", "four ranks to a head", "fused and shared"],
)
def test_heads_reach_the_ranks_that_attend_with_them(
    counts: tuple[int, ...], shared: tuple[bool, ...], sharing: int
) -> None:
    size, x = 3, 4
    features = [count * size for count in counts]
    whole = torch.randn(2, 8, sum(features), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with simulated_ranks(x):
        mesh = with_digits(Mesh(("tensor_y", 1), ("tensor_x", x)).folded())
        folds = Mesh(("tensor_y", 2), ("tensor_x", x))
        mesh = Mesh(*mesh.axes, folds=dict(with_digits(folds).folds))
        axes = MeshAxes(mesh, Groups(mesh))
        name = part_of_x(mesh, sharing, 1) if sharing > 1 else "none"
        scatter = ScatterHeads(axes["tensor_x"], tuple(features), shared, _axis(axes, name), size)
        partial = per_rank(lambda rank: whole * (rank + 1) / 10).requires_grad_()  # weights that sum to 1
        mine = scatter(partial)
        weight = per_rank(lambda rank: torch.full((), float(rank + 1), dtype=torch.float64))
        (mine * weight).sum().backward()
        assert partial.grad is not None
        with one_device():
            for rank, got in each_rank(mine.detach()).items():
                torch.testing.assert_close(got, _heads_of(whole, features, shared, sharing, rank, x, size))
            expected = torch.zeros_like(whole)
            for rank in range(x):
                view = _heads_of(expected, features, shared, sharing, rank, x, size, add=rank + 1.0)
                assert view is None
            for gradient in each_rank(partial.grad).values():
                torch.testing.assert_close(gradient, expected)


def _axis(axes: MeshAxes, name: str) -> Axis:
    return axes[name]


def _heads_of(whole, features, shared, sharing, rank, x, size, add=None):  # type: ignore[no-untyped-def]
    """The features that a rank attends with; or add a number to them."""
    pieces, at = [], 0
    for length, several in zip(features, shared, strict=True):
        if several:
            start, width = at + rank // sharing * size, size
        else:
            start, width = at + rank * (length // x), length // x
        if add is not None:
            whole[..., start : start + width] += add
        pieces.append(whole[..., start : start + width])
        at += length
    return None if add is not None else torch.cat(pieces, -1)
