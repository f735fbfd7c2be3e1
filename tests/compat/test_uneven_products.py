"""Products whose sizes differ between simulated ranks are those of each rank, with their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from hyper_parallel.compat.local_tensor import uneven_products

Shape = tuple[int, ...]
UNEVEN = -1
"""In the place of a size that is 3 on rank 0 and 2 on rank 1."""
NONE = -2
"""In the place of a size that is 3 on rank 0 and 0 on rank 1."""

CASES: dict[str, tuple[Callable[..., Tensor], tuple[Shape, ...]]] = {
    "outputs": (linear, ((2, 5, 4), (UNEVEN, 4), (UNEVEN,))),
    "inputs": (linear, ((2, 5, UNEVEN), (4, UNEVEN))),
    "matrix": (torch.matmul, ((2, 5, UNEVEN), (UNEVEN, 4))),
    "nothing": (linear, ((2, 5, NONE), (4, NONE))),
    "vector-linear": (linear, ((UNEVEN,), (4, UNEVEN))),
    "vector": (lambda a, b: a @ b, ((2, 5, UNEVEN), (UNEVEN,))),
    "vector-first": (torch.matmul, ((UNEVEN,), (2, UNEVEN, 4))),
    "heads": (lambda a, b: a.matmul(b), ((2, UNEVEN, 5, 4), (2, UNEVEN, 4, 6))),
    "broadcast": (torch.matmul, ((2, 1, 5, UNEVEN), (6, UNEVEN, 4))),
    "computed again": (lambda a, b: checkpoint(linear, a, b, use_reentrant=False), ((2, 5, 4), (UNEVEN, 4))),
    "matrix-first": (torch.matmul, ((5, UNEVEN), (2, UNEVEN, 4))),
}


def _drawn(shape: Shape, rank: int) -> Tensor:
    sizes = [{UNEVEN: 3 - rank, NONE: 3 - 3 * rank}.get(size, size) for size in shape]
    return torch.randn(sizes, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def _results(product: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    leaves = [x.requires_grad_() for x in tensors]
    result = product(*leaves)
    result.square().sum().backward()
    return [result.detach(), *(x.grad for x in leaves if x.grad is not None)]


@pytest.mark.parametrize("forced", [True, False], ids=["ours", "as-needed"])
@pytest.mark.parametrize("case", CASES)
def test_products_of_uneven_sizes(case: str, forced: bool) -> None:
    product, shapes = CASES[case]
    expected = [_results(product, [_drawn(shape, rank) for shape in shapes]) for rank in range(2)]
    tensors: list[Tensor] = [
        LocalTensor({rank: _drawn(shape, rank) for rank in range(2)}) for shape in shapes
    ]
    with uneven_products(always=forced), LocalTensorMode(2):
        found = _results(product, tensors)
    assert len(found) == 1 + len(shapes)
    for rank in range(2):
        for one, other in zip(found, expected[rank], strict=True):
            assert isinstance(one, LocalTensor)
            torch.testing.assert_close(one._local_tensors[rank], other, rtol=1e-12, atol=1e-12)
