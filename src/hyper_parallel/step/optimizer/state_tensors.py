"""Tensors of an optimizer's state: made as zeros, where a memory budget keeps them."""

from __future__ import annotations

import torch
from torch import Tensor

from hyper_parallel.compat.paged_out_parameters import filled, hollow


def zeros(
    name: str,
    like: Tensor,
    shape: tuple[int, ...] | torch.Size | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A tensor of the state, by its name there: zeros on the device of `like`, and of its shape and dtype unless others
    are given."""
    shape, dtype = like.shape if shape is None else shape, like.dtype if dtype is None else dtype
    same = shape == like.shape and dtype == like.dtype
    made = hollow(torch.empty_like(like) if same else like.new_empty(shape, dtype=dtype))
    with filled(name, made):
        return made.zero_()
