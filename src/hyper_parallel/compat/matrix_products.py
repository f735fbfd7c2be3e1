"""Matrix products of a thread, computed by a function of ours wherever PyTorch calls them.

The dispatcher has a key above autograd and all devices that PyTorch's own tests use, and that is off unless a thread
turns it on. Here it has kernels of the matrix products, and every other operator falls through it at no cost. Products
inside other operators (einsum) are seen as well. A `TorchFunctionMode` would not see those, and would be shown every
attribute of every tensor that is read: 75 calls in a layer of a Llama, 7 of them products.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor | None]
"""x [M, K] or [B, M, K], weight [K, N] or [B, K, N] and bias (broadcast to the result) to the product; None to have it
computed as usual."""

_KEY = "TESTING_ONLY_GenericWrapper"


class products_by(AbstractContextManager[None]):
    """In the block, products of this thread are computed by a function; the innermost block counts."""

    def __init__(self, product: Product) -> None:
        self._product = product
        self._entered: list[tuple[Product | None, Any]] = []

    def __enter__(self) -> None:
        on = torch._C._IncludeDispatchKeyGuard(_key())  # type: ignore[attr-defined]
        on.__enter__()
        self._entered.append((_CURRENT.product, on))
        _CURRENT.product = self._product

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _CURRENT.product, on = self._entered.pop()
        on.__exit__(kind, error, trace)


def unchanged_products() -> AbstractContextManager[Any]:
    """In the block, products are PyTorch's own."""
    return torch._C._ExcludeDispatchKeyGuard(_keys())  # type: ignore[no-any-return, attr-defined]


class _Current(threading.local):
    product: Product | None = None


_CURRENT = _Current()


def _mm(x: Tensor, weight: Tensor) -> Tensor:
    with unchanged_products():
        found = _found(x, weight, None)
        return torch.mm(x, weight) if found is None else found


def _bmm(x: Tensor, weight: Tensor) -> Tensor:
    with unchanged_products():
        found = _found(x, weight, None)
        return torch.bmm(x, weight) if found is None else found


def _addmm(bias: Tensor, x: Tensor, weight: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    with unchanged_products():
        found = _found(x, weight, bias) if beta == alpha == 1 else None
        return torch.addmm(bias, x, weight, beta=beta, alpha=alpha) if found is None else found


def _baddbmm(bias: Tensor, x: Tensor, weight: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    with unchanged_products():
        found = _found(x, weight, bias) if beta == alpha == 1 else None
        return torch.baddbmm(bias, x, weight, beta=beta, alpha=alpha) if found is None else found


def _found(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    assert _CURRENT.product is not None, "the key is on, and no function is known"
    return _CURRENT.product(x, weight, bias)


@cache
def _key() -> Any:
    """The key, whose kernels are registered when it is first asked for."""
    others, own = Library("_", "IMPL", _KEY), Library("aten", "IMPL", _KEY)
    others.fallback(fallthrough_kernel)
    for name, kernel in (("mm", _mm), ("bmm", _bmm), ("addmm", _addmm), ("baddbmm", _baddbmm)):
        own.impl(name, kernel)
    _LIBRARIES.extend((others, own))
    return torch._C._dispatch_key_parse(_KEY)


@cache
def _keys() -> Any:
    return torch._C.DispatchKeySet(_key())


_LIBRARIES: list[Library] = []
"""Kernels are registered as long as their library is there."""
