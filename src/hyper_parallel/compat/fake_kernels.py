"""Fake-tensor kernels for operators whose PyTorch version is missing or wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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


_KERNELS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._grouped_mm.default: _grouped_mm,
    torch.ops.aten._fused_adamw_.tensor_lr: _fused_adamw,
}
