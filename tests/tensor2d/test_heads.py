"""Heads summed over tensor_x reach the ranks that attend with them, and their gradients come back summed."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel.compat.local_tensor import each_rank, one_device, per_rank, simulated_ranks
from hyper_parallel.layout import Mesh
from hyper_parallel.shard.process_mesh import ProcessMesh
from hyper_parallel.shard.tensor.apply_2d import ScatterHeads
from hyper_parallel.shard.tensor.factorization import part_of_x, with_digits


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
        # Without 2D a mesh has no digits, and one row of ranks is all that this needs.
        folds = dict(with_digits(Mesh(("tensor_y", 2), ("tensor_x", x))).folds)
        mesh = Mesh(("tensor_y", 1), ("tensor_x", x), folds=folds)
        axes = ProcessMesh.of(mesh)
        name = part_of_x(mesh, sharing, 1) if sharing > 1 else "none"
        scatter = ScatterHeads(axes["tensor_x"], tuple(features), shared, axes[name], size)
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
