"""Arithmetic on lists of tensors: one launch for many where the device has that, accurate where it has not."""

from __future__ import annotations

import torch


def sum_of_squares(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The sum of the squares of all elements: zero-dim float32. All tensors lie on one device; the list is not empty.

    On the CPU, norms and the dot product of the BLAS add a float32 tensor up in a few accumulators, which loses four
    digits on a million elements; `sum` adds pairwise and loses none, at the price of a temporary.
    """
    if tensors[0].device.type == "cpu":
        return torch.stack([tensor.float().square().sum() for tensor in tensors]).sum()
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)).square().sum()


def scale_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply every tensor in place by a zero-dim tensor."""
    torch._foreach_mul_(tensors, factor)
