"""The cross-entropy kernel, whole and split over the vocabulary, against PyTorch's own and autograd, in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import run_ranks
from hyper_parallel.compat.local_tensor import each_rank, one_device, per_rank, simulated_ranks
from hyper_parallel.layout import Mesh
from hyper_parallel.shard.loss import cross_entropy_sum, valid_tokens
from hyper_parallel.shard.mesh_axis import Axis
from hyper_parallel.shard.process_mesh import ProcessMesh


def _case(n: int, v: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, v, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, v, (n,), generator=generator)
    labels[::3] = -100
    return logits, labels


def _reference(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float, z: float
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    total = torch.nn.functional.cross_entropy(
        leaf, labels, ignore_index=-100, reduction="sum", label_smoothing=smoothing
    )
    total = total + z * (leaf.logsumexp(-1).square() * (labels != -100)).sum()
    (gradient,) = torch.autograd.grad(1.5 * total, leaf)
    return total.detach(), gradient


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 7),
    v=st.integers(1, 9),
    smoothing=st.sampled_from([0.0, 0.1]),
    z=st.sampled_from([0.0, 1e-2]),
    seed=st.integers(0, 99),
)
def test_whole_logits(n: int, v: int, smoothing: float, z: float, seed: int) -> None:
    logits, labels = _case(n, v, seed)
    expected, gradient = _reference(logits, labels, smoothing, z)
    leaf = logits.requires_grad_()
    total = cross_entropy_sum(leaf, labels, label_smoothing=smoothing, z_loss=z)
    (1.5 * total).backward()
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(leaf.grad, gradient)


def _split(
    axes: ProcessMesh, name: str, logits: torch.Tensor, labels: torch.Tensor, smoothing: float, z: float
):  # type: ignore[no-untyped-def]
    """(total, this rank's gradient) with the vocabulary split over `name`, a leaf on each rank."""
    axis = axes[name]
    leaf = per_rank(lambda rank: logits[:, slice(*axis.interval(logits.size(1), rank))].clone())
    leaf.requires_grad_()
    total = cross_entropy_sum(
        leaf,
        per_rank(lambda rank: labels.clone()),
        vocabulary=axis,
        size=logits.size(1),
        label_smoothing=smoothing,
        z_loss=z,
    )
    (1.5 * total).backward()
    return total.detach(), leaf.grad


@pytest.mark.parametrize("v", [12, 10, 5, 3, 1])  # even, uneven, and fewer tokens than ranks: empty chunks
@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.1, 1e-2)])
def test_split_vocabulary(v: int, smoothing: float, z: float) -> None:
    logits, labels = _case(7, v)
    expected, gradient = _reference(logits, labels, smoothing, z)
    mesh = Mesh(("tensor_x", 4))
    with simulated_ranks(4):
        axes = ProcessMesh.of(mesh)
        total, mine = _split(axes, "tensor_x", logits, labels, smoothing, z)
        with one_device():
            for rank, found in each_rank(total).items():
                torch.testing.assert_close(found, expected)
                span = slice(*axes["tensor_x"].interval(v, rank))
                torch.testing.assert_close(each_rank(mine)[rank], gradient[:, span])


def _rank_split(rank: int, world: int, v: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits, labels = _case(7, v)
    mesh = Mesh(("tensor_x", world))
    total, gradient = _split(ProcessMesh.of(mesh), "tensor_x", logits, labels, 0.1, 1e-2)
    return total, gradient


@pytest.mark.parametrize("v", [10, 2])
def test_real_workers_split_the_vocabulary(v: int) -> None:
    expected, gradient = _reference(*_case(7, v), 0.1, 1e-2)
    results = run_ranks(_rank_split, 3, v)
    for total, _ in results:
        torch.testing.assert_close(total, expected)
    torch.testing.assert_close(torch.cat([mine for _, mine in results], -1), gradient)


def test_positions_split_over_another_axis() -> None:
    """2D: the vocabulary over y, the positions over x."""
    logits, labels = _case(8, 10)
    expected, gradient = _reference(logits, labels, 0.1, 1e-2)
    mesh = Mesh(("tensor_y", 2), ("tensor_x", 2))
    with simulated_ranks(4):
        axes = ProcessMesh.of(mesh)
        x, y = axes["tensor_x"], axes["tensor_y"]

        def span(axis: Axis, length: int, rank: int) -> slice:
            return slice(*axis.interval(length, rank))

        leaf = per_rank(lambda rank: logits[span(x, 8, rank), span(y, 10, rank)].clone()).requires_grad_()
        mine = per_rank(lambda rank: labels[span(x, 8, rank)].clone())
        total = cross_entropy_sum(
            leaf, mine, vocabulary=y, size=10, positions=x, label_smoothing=0.1, z_loss=1e-2
        )
        (1.5 * total).backward()
        with one_device():
            for rank, found in each_rank(total.detach()).items():
                torch.testing.assert_close(found, expected)
                torch.testing.assert_close(
                    each_rank(leaf.grad)[rank], gradient[span(x, 8, rank), span(y, 10, rank)]
                )


def test_low_precision_logits_are_computed_with_in_fp32() -> None:
    logits, labels = _case(12, 11)
    low = logits.bfloat16().requires_grad_()
    total = cross_entropy_sum(low, labels)
    total.backward()
    assert total.dtype == torch.float32 and low.grad.dtype == torch.bfloat16
    wide = low.detach().float().requires_grad_()
    expected = cross_entropy_sum(wide, labels)
    expected.backward()
    torch.testing.assert_close(total, expected, rtol=0, atol=0)
    torch.testing.assert_close(low.grad, wide.grad.bfloat16(), rtol=0, atol=0)


def test_a_part_without_valid_tokens_adds_nothing_whatever_its_logits() -> None:
    logits, labels = _case(6, 5)
    logits[0, 0] = torch.inf
    logits.requires_grad_()
    total = cross_entropy_sum(logits, torch.full_like(labels, -100), label_smoothing=0.1, z_loss=0.1)
    total.backward()
    assert total == 0 and not logits.grad.any()
    assert int(valid_tokens(labels)) == 4


def test_a_label_beyond_a_split_vocabulary_is_not_taken_for_a_right_one() -> None:
    logits, labels = _case(4, 10)
    labels[1] = 10
    mesh = Mesh(("tensor_x", 2))
    with simulated_ranks(2):
        total, _ = _split(ProcessMesh.of(mesh), "tensor_x", logits, labels, 0.0, 0.0)
        with one_device():
            assert all(found.isnan() for found in each_rank(total).values())
    with pytest.raises((IndexError, RuntimeError)):
        cross_entropy_sum(logits, labels)
