"""Clipping: a captured step scales gradients as an eager step does, bit by bit."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel.shard.sharded_model import clip_gradients


def _gradients() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw) for shape in ((7, 3), (5,), (2, 2, 2))]


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()


@pytest.mark.parametrize("limit", [0.25, 1.0])
def test_gradients_above_the_limit_are_scaled_to_it_in_a_graph_too(limit: float) -> None:
    eager, captured = _gradients(), _gradients()
    norm = _norm(eager)
    clip_gradients(eager, norm, limit)
    clip_gradients(captured, norm, limit, in_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(eager, captured, strict=True))
    assert float(_norm(eager)) == pytest.approx(limit, rel=1e-5)


def test_gradients_below_the_limit_stay_as_they_are() -> None:
    for in_graph in (False, True):
        gradients = _gradients()
        clip_gradients(gradients, _norm(gradients), 100.0, in_graph=in_graph)
        assert all(torch.equal(one, other) for one, other in zip(gradients, _gradients(), strict=True))


def test_a_norm_at_the_limit_is_not_clipped_in_a_graph() -> None:
    """The factor alone would be below 1 by its 1e-6; an eager step compares with the limit before it clips."""
    gradients = _gradients()
    limit = float(_norm(gradients))
    clip_gradients(gradients, _norm(gradients), limit, in_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(gradients, _gradients(), strict=True))
