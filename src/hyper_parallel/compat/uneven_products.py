"""Matrix products of tensors whose sizes differ between simulated ranks.

PyTorch 2.11 reads the sizes of the arguments of `matmul` and `linear` as plain numbers, before it comes to operators
that local tensors have. Here they are written with such operators: `mm` and `bmm`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

_MATMUL = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


def uneven_products() -> AbstractContextManager[object]:
    """Inside, products are those of this module where this release of PyTorch does not have them. Called outside of
    local-tensor modes."""
    return UnevenProducts() if _missing() else nullcontext()


@functools.cache
def _missing() -> bool:
    """Whether `linear` cannot do sizes that differ between ranks."""
    row = LocalTensor({rank: torch.zeros(1, 1, 1, device="cpu") for rank in range(2)})
    weight = LocalTensor({rank: torch.zeros(1 + rank, 1, device="cpu") for rank in range(2)})
    with LocalTensorMode(2), torch.no_grad():
        try:
            linear(row, weight)
        except RuntimeError:
            return True
    return False


class UnevenProducts(TorchFunctionMode):
    """Products of tensors with sizes that differ between ranks, by `mm` and `bmm`; all else is PyTorch's."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The result of `func`."""
        given = kwargs or {}
        if func is linear and _uneven(args, given):
            return _linear(*args, **given)
        if func in _MATMUL and _uneven(args, given):
            return _matmul(*args, **given)
        return func(*args, **given)


def _uneven(args: Sequence[Any], given: Mapping[str, Any]) -> bool:
    return any(
        isinstance(size, torch.SymInt)
        for one in (*args, *given.values())
        if isinstance(one, Tensor)
        for size in one.shape
    )


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., I] by [O, I]."""
    rows = linear(input.reshape(-1, input.size(-1)), weight, bias)
    return rows.view(*input.shape[:-1], weight.size(0))


def _matmul(input: Tensor, other: Tensor) -> Tensor:
    """[..., M, K] by [..., K, N]; either may be a vector [K]."""
    if input.dim() == 1:
        return _matmul(input[None], other).squeeze(-2)
    if other.dim() == 1:
        return torch.mv(input.reshape(-1, input.size(-1)), other).view(input.shape[:-1])
    if other.dim() == 2:
        return _linear(input, other.t())
    pairs = itertools.zip_longest(input.shape[-3::-1], other.shape[-3::-1], fillvalue=1)
    batch = [second if first == 1 else first for first, second in pairs][::-1]
    one, two = (
        x.expand(*batch, *x.shape[-2:]).reshape(math.prod(batch), *x.shape[-2:]) for x in (input, other)
    )
    return torch.bmm(one, two).view(*batch, input.size(-2), other.size(-1))
