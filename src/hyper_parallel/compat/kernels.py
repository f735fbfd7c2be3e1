"""Kernels of PyTorch's without a public interface: attention of a block of keys, fused arithmetic on lists of tensors.

`kernel_for` gives the kernel of a device that computes a block exactly, or None: then the caller computes it step by
step. The operators are private to PyTorch; their signatures are those of ATen's ``native_functions.yaml``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

_aten = torch.ops.aten

Gradients = tuple[Tensor, Tensor, Tensor]


class Block(NamedTuple):
    """Queries [B, H, S, D] and a block of keys and values [B, K, T, D], K dividing H, and how they attend."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    """bool [B or 1, 1, S, T], True where seen."""
    causal: bool
    """For S = T, from the upper left corner."""
    scale: float


class Kernel(ABC):
    """Attention to a block of keys.

    Kernels want keys and values of one size, a multiple of `_multiple`: they are given padded with zeros, which changes
    no score.
    """

    _multiple = 8

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        """(output [B, H, S, D], natural log-sum-exp [B, H, S]); 0 and -inf where nothing is seen."""
        out, lse = self._forward(self._padded(block))
        return out[..., : block.v.size(-1)], lse

    def backward(self, gradient: Tensor, block: Block, out: Tensor, lse: Tensor) -> Gradients:
        """The block's part of the gradients; `out` and `lse` are those of all blocks, +inf where nothing is seen."""
        padded = self._padded(block)
        size = padded.q.size(-1)
        dq, dk, dv = self._backward(_fit(gradient, size), padded, _fit(out, size), lse)
        return dq[..., : block.q.size(-1)], dk[..., : block.k.size(-1)], dv[..., : block.v.size(-1)]

    def _padded(self, block: Block) -> Block:
        size = -(-max(block.q.size(-1), block.v.size(-1)) // self._multiple) * self._multiple
        return block._replace(q=_fit(block.q, size), k=_fit(block.k, size), v=_fit(block.v, size))

    @abstractmethod
    def _forward(self, block: Block) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _backward(self, gradient: Tensor, block: Block, out: Tensor, lse: Tensor) -> Gradients: ...


def kernel_for(q: Tensor, v: Tensor, masked: bool) -> Kernel | None:
    """The kernel for these queries and values, or None where only plain arithmetic is right."""
    size = max(q.size(-1), v.size(-1))
    if q.device.type == "cpu":
        supported = q.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        return _FlashOnCpu() if supported else None
    if q.device.type == "cuda":
        half = q.dtype in (torch.bfloat16, torch.float16)
        if half and not masked and size <= 256:
            return _Flash()
        if half or q.dtype == torch.float32:
            return _Efficient()
    return None


def _fit(x: Tensor, size: int) -> Tensor:
    return x if x.size(-1) == size else pad(x, (0, size - x.size(-1)))


def _bias(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """The mask as what is added to the scores."""
    if mask is None:
        return None
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, float("-inf"))


def _nothing_where_unseen(out: Tensor, lse: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Kernels leave other values (0, or NaN) where a query sees no key."""
    if mask is None:
        return out, lse
    unseen = ~mask.any(-1)
    return out.masked_fill(unseen.unsqueeze(-1), 0.0), lse.masked_fill(unseen, float("-inf"))


class _FlashOnCpu(Kernel):
    _multiple = 1

    def _forward(self, block: Block) -> tuple[Tensor, Tensor]:
        q, k, v, mask, causal, scale = block
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=_bias(mask, q), scale=scale
        )
        return _nothing_where_unseen(out, lse, mask)

    def _backward(self, gradient: Tensor, block: Block, out: Tensor, lse: Tensor) -> Gradients:
        q, k, v, mask, causal, scale = block
        # The operator reads the log-sum-exp with the strides that its own forward gives it.
        lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, lse, 0.0, causal, attn_mask=_bias(mask, q), scale=scale
        )
        return dq, dk, dv


class _Flash(Kernel):
    """FlashAttention: half precision, no mask but the causal one; K may be less than H."""

    def _forward(self, block: Block) -> tuple[Tensor, Tensor]:
        q, k, v, mask, causal, scale = block
        assert mask is None, "flash attention takes no mask"
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse

    def _backward(self, gradient: Tensor, block: Block, out: Tensor, lse: Tensor) -> Gradients:
        q, k, v, _, causal, scale = block
        # Without dropout the state of the generator is not read; it must only be there.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        offset = torch.zeros((), dtype=torch.uint64, device=q.device)
        lengths = None, None, q.size(2), k.size(2)
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            gradient,
            q,
            k,
            v,
            out,
            lse.float().contiguous(),
            *lengths,
            0.0,
            causal,
            state,
            offset,
            scale=scale,
        )
        return dq, dk, dv


class _Efficient(Kernel):
    """Memory-efficient attention: any mask as a bias; key-value heads must be as many as query heads."""

    _LSE_MULTIPLE = 32
    """The kernel keeps the log-sum-exp padded to this many queries."""
    _BIAS_MULTIPLE = 16
    """It reads the bias in vectors: rows begin at multiples of this many elements."""

    def _forward(self, block: Block) -> tuple[Tensor, Tensor]:
        q, k, v, mask, causal, scale = block
        groups = q.size(1) // k.size(1)
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out, lse, _, _ = _aten._scaled_dot_product_efficient_attention(
            q, k, v, self._aligned(mask, q), True, 0.0, causal, scale=scale
        )
        return _nothing_where_unseen(out, lse[..., : q.size(2)], mask)

    def _backward(self, gradient: Tensor, block: Block, out: Tensor, lse: Tensor) -> Gradients:
        q, k, v, mask, causal, scale = block
        groups = q.size(1) // k.size(1)
        repeated = [x.repeat_interleave(groups, 1) for x in (k, v)]
        lse = pad(lse.float(), (0, -q.size(2) % self._LSE_MULTIPLE), value=float("inf")).contiguous()
        bias, state = self._aligned(mask, q), torch.zeros((), dtype=torch.int64, device=q.device)
        needed = [True, True, True, False]
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            gradient, q, *repeated, bias, out, lse, state, state, 0.0, needed, causal, scale=scale
        )
        shared = [x.unflatten(1, (k.size(1), groups)).sum(2) for x in (dk, dv)]
        return dq, shared[0], shared[1]

    def _aligned(self, mask: Tensor | None, q: Tensor) -> Tensor | None:
        bias = _bias(mask, q)
        if bias is None:
            return None
        keys = bias.size(-1)
        bias = pad(bias, (0, -keys % self._BIAS_MULTIPLE))[..., :keys]
        return bias.expand(q.size(0), q.size(1), q.size(2), keys)


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
