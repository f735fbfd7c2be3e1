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


def adamw_(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    first: list[torch.Tensor],
    second: list[torch.Tensor],
    steps: list[torch.Tensor],
    *,
    lr: float | torch.Tensor,
    betas: tuple[float, float],
    weight_decay: float,
    eps: float,
) -> None:
    """One fused update in place (`torch.optim.AdamW(fused=True)`); `steps` are zero-dim fp32 counts of updates.

    `lr` as a zero-dim float64 tensor on the host is read by the kernel: the update is the same to the bit.
    """
    torch._foreach_add_(steps, 1)
    torch._fused_adamw_(
        parameters,
        gradients,
        first,
        second,
        [],
        steps,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,  # type: ignore[arg-type]
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )
