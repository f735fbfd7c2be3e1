"""Fake-tensor kernels for operators whose PyTorch version is missing or wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


def fake_kernel(operator: Any) -> Callable[..., Any] | None:
    """A function of the operator's fake arguments to its fake result; None where PyTorch's own is right."""
    return _KERNELS.get(operator)


def _grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Matrix products of groups of rows (or of a sum's terms, between two matrices). PyTorch's fake kernel takes bf16
    only and gives contiguous rows; the kernels take fp32 too and round each row up to 16 bytes."""
    flat = mat_a.dim() == 2, mat_b.dim() == 2
    rows, columns = mat_a.size(-2), mat_b.size(-1)
    if flat[0] == flat[1]:
        groups = offs.size(0) if flat[0] and offs is not None else mat_a.size(0)
        shape = [groups, rows, columns]
    else:
        shape = [rows, columns]
    dtype = out_dtype or mat_a.dtype
    unit = 16 // dtype.itemsize
    pitch = -(-columns // unit) * unit
    strides = [rows * pitch, pitch, 1][-len(shape) :]
    return mat_a.new_empty_strided(shape, strides, dtype=dtype)


def _fused_adamw(*_: Any, **__: Any) -> None:
    """All of it is written in place. PyTorch has no fake kernel of it with a tensor for the learning rate, and runs the
    real one on zeros instead, which takes four times the memory of the parameter."""


def _mkldnn_rnn_layer(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """A layer of an LSTM by oneDNN, which alone knows how large its workspace is: asked of the kernel, once for each
    kind of call. PyTorch's fake kernel says that there is none."""
    *results, workspace = torch.ops.aten.mkldnn_rnn_layer.default(*arguments)
    kinds = tuple(
        (tuple(argument.shape), argument.dtype) if isinstance(argument, torch.Tensor) else _hashable(argument)
        for argument in arguments
    )
    return (*results, workspace.new_empty(_rnn_workspace(kinds)))


def _hashable(argument: Any) -> Any:
    return tuple(argument) if isinstance(argument, list) else argument


@functools.lru_cache(256)
def _rnn_workspace(kinds: tuple[Any, ...]) -> int:
    """Bytes; `kinds`: (shape, dtype) of tensors, and the other arguments."""
    with _disable_current_modes(), torch.enable_grad():  # type: ignore[no-untyped-call]
        given = [_zeros(kind) for kind in kinds]
        return int(torch.ops.aten.mkldnn_rnn_layer.default(*given)[-1].numel())


def _zeros(kind: Any) -> Any:
    if not isinstance(kind, tuple):
        return kind
    if len(kind) != 2 or not isinstance(kind[1], torch.dtype):
        return list(kind)
    return torch.zeros(kind[0], dtype=kind[1], device="cpu")


_KERNELS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._grouped_mm.default: _grouped_mm,
    torch.ops.aten._fused_adamw_.tensor_lr: _fused_adamw,
    torch.ops.aten.mkldnn_rnn_layer.default: _mkldnn_rnn_layer,
}
