"""Gradient layout: strides like the parameter's, in memory of its own."""

from __future__ import annotations

import torch


def owned(gradient: torch.Tensor, like: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """The gradient, or a copy of it, that may be written to.

    It has the strides of `like`, but for an expanded one, whose elements lie in one place, and a storage whose address
    is not in `taken`, to which it is added.
    """
    gradient = gradient.detach()
    expanded = any(size > 1 and not step for size, step in zip(like.shape, like.stride(), strict=True))
    strides = torch.empty(like.shape, device="meta").stride() if expanded else like.stride()
    if gradient.stride() != strides or _address(gradient) in taken:
        gradient = torch.empty_strided(
            like.shape, strides, dtype=gradient.dtype, device=gradient.device
        ).copy_(gradient)
    taken.add(_address(gradient))
    return gradient


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
