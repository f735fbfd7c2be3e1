"""Matrix products in blocks of a fixed number of rows, so that a row's bits do not depend on how many there are.

A library chooses its kernel by the size of a product, and with several threads whether these share a sum: MKL with two
threads adds up 64 rows of [M, 1408] x [1408, 512] in another order than 32. Products of one size have one order. On the
host, blocks of 32 rows run as fast as larger products; elsewhere products are left as they are.

The host reads weights of K rows of N fastest: 32 rows take 0.55 to 0.85 of the time that they take with the N rows of K
that linear layers have (`column_major`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_PLAIN = (Tensor, nn.Parameter)
"""Not distributed tensors, whose products are those of their shards."""


class BlockedProducts(TorchFunctionMode):
    """While it is entered, products of a multiple of `block` rows on the host are computed block by block."""

    def __init__(self, block: int) -> None:
        super().__init__()
        self._block = block

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The function, or its product by blocks."""
        given = kwargs or {}
        read = _FORMS.get(func)
        form = read(*args, **given) if read is not None else None
        found = self._blocked(*form) if form is not None else None
        return func(*args, **given) if found is None else found

    def _blocked(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """x [..., K] @ weight [K, N] + bias [N], or [B, M, K] @ [B, K, N]; None for what is no such product."""
        if x.device.type != "cpu" or type(x) not in _PLAIN or type(weight) not in _PLAIN:
            return None
        batched = weight.dim() == x.dim() == 3 and x.size(0) == weight.size(0)
        if x.dim() < 2 or (weight.dim() != 2 and not batched):
            return None
        rows = x.size(1) if batched else x.numel() // max(x.size(-1), 1)
        if rows == 0 or rows % self._block:
            return None
        firsts = range(0, rows, self._block)
        if batched:
            return torch.cat([torch.bmm(x[:, first : first + self._block], weight) for first in firsts], 1)
        flat = x.reshape(rows, x.size(-1))
        out = flat.new_empty(rows, weight.size(1))
        for first in firsts:
            block, own = flat[first : first + self._block], out[first : first + self._block]
            if bias is None:
                torch.mm(block, weight, out=own)
            else:
                torch.addmm(bias, block, weight, out=own)
        return out.view(*x.shape[:-1], -1)


Form = tuple[Tensor, Tensor, Tensor | None]


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Form:
    return input, weight.t(), bias


def _product(input: Tensor, other: Tensor, **more: Any) -> Form | None:
    return None if more else (input, other, None)


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **more: Any) -> Form | None:
    return None if more else (mat1, mat2, input)


_FORMS: dict[Callable[..., Any], Callable[..., Form | None]] = {
    nn.functional.linear: _linear,
    torch.addmm: _addmm,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, torch.bmm), _product),
}


def column_major(model: nn.Module, rows: int) -> None:
    """Lay the float32 weights of a model's linear layers on the host out as K rows of N, in place, where products of
    `rows` rows have the same bits with them, and so with any way of keeping weights. Weights that another module uses
    too are left alone."""
    uses = Counter(
        id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False)
    )
    same: dict[torch.Size, bool] = {}
    for module in model.modules():
        if type(module) is not nn.Linear:
            continue
        weight = module.weight
        if type(weight) not in _PLAIN or weight.device.type != "cpu" or weight.dtype != torch.float32:
            continue
        if uses[id(weight)] == 1 and same.get(weight.shape, True):
            turned = weight.data.t().contiguous()
            if weight.shape not in same:
                x = torch.randn(rows, weight.size(1), generator=torch.Generator().manual_seed(0))
                same[weight.shape] = torch.equal(x @ weight.data.t(), x @ turned)
            if same[weight.shape]:
                weight.data = turned.t()
