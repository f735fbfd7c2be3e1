"""Chunked loss: a sum over position chunks, each with its gradient at once.

What a chunk needs for its backward pass, its logits first of all, is gone before the next chunk begins, and the head
is computed once (Liger-Kernel's fused linear cross-entropy, arXiv 2410.10989, section 3.2, for any head). The
backward pass hands out what was taken, scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Loss = Callable[[Tensor, int, int], Tensor]
"""(hidden [1, C, h], first position, last position + 1) to the zero-dim loss of these positions."""


def chunked_sum(loss: Loss, hidden_NH: Tensor, weights: Sequence[Tensor], chunk: int) -> Tensor:
    """Σ over chunks of `chunk` positions of `loss`, a zero-dim tensor with gradients to `hidden_NH` and `weights`.

    `hidden_NH` [N, h]. `weights`: the tensors, beside its argument, that `loss` may compute with and whose gradient
    is wanted; with more than one chunk theirs are summed in fp32. Without gradients it is only the sum.
    """
    bounds = [(at, min(at + chunk, hidden_NH.size(0))) for at in range(0, hidden_NH.size(0), chunk)]
    asked = torch.is_grad_enabled()
    wanted = [weight for weight in weights if weight.requires_grad] if asked else []
    if not wanted and not (asked and hidden_NH.requires_grad):
        return torch.stack([loss(hidden_NH[None, a:b], a, b) for a, b in bounds]).sum()
    gathered = _Gradients(hidden_NH, wanted, several=len(bounds) > 1)
    totals = []
    for a, b in bounds:
        leaf = hidden_NH[None, a:b].detach().requires_grad_(hidden_NH.requires_grad)
        total = loss(leaf, a, b)
        gathered.add(total, leaf, a, b)
        totals.append(total.detach())
    total = torch.stack(totals).sum()
    sources = [hidden_NH, *wanted] if hidden_NH.requires_grad else wanted
    taken = gathered.taken(sources)
    found = [
        (source, gradient) for source, gradient in zip(sources, taken, strict=True) if gradient is not None
    ]
    return _Given.apply(total, [gradient for _, gradient in found], *(source for source, _ in found))  # type: ignore[no-any-return]


class _Gradients:
    """The gradients of the chunks so far."""

    def __init__(self, hidden_NH: Tensor, weights: list[Tensor], several: bool) -> None:
        self._hidden = torch.empty_like(hidden_NH) if hidden_NH.requires_grad else None
        self._weights, self._several = weights, several
        self._sums: list[Tensor | None] = [None] * len(weights)

    def add(self, total: Tensor, leaf: Tensor, start: int, stop: int) -> None:
        """Take the gradients of one chunk's `total`; what its graph kept is freed."""
        hidden = self._hidden is not None
        sources = [leaf, *self._weights] if hidden else self._weights
        gradients = list(torch.autograd.grad(total, sources, allow_unused=True))
        if self._hidden is not None:
            first = gradients.pop(0)
            part = self._hidden[start:stop]
            part.zero_() if first is None else part.copy_(first[0])
        for at, gradient in enumerate(gradients):
            if gradient is not None:
                self._sums[at] = self._added(self._sums[at], gradient)

    def _added(self, so_far: Tensor | None, gradient: Tensor) -> Tensor:
        if so_far is not None:
            return so_far.add_(gradient)
        # Of many chunks: in a low precision each addition would round.
        wide = self._several and gradient.dtype in (torch.bfloat16, torch.float16)
        # A copy, since autograd may hand out one tensor twice, and this one is written to.
        return gradient.to(torch.float32 if wide else gradient.dtype, copy=True)

    def taken(self, sources: list[Tensor]) -> list[Tensor | None]:
        """The gradients, in the order of `sources`: hidden, if it wants one, and the weights."""
        return [self._hidden, *self._sums] if len(sources) > len(self._sums) else self._sums


class _Given(torch.autograd.Function):
    """A value whose gradients are known."""

    @staticmethod
    def forward(ctx, total: Tensor, gradients: list[Tensor], *sources: Tensor) -> Tensor:  # type: ignore[no-untyped-def,override]
        ctx.gradients, ctx.dtypes = gradients, [source.dtype for source in sources]
        return total.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def,override]
        if ctx.gradients is None:
            raise RuntimeError(
                "the loss was differentiated a second time, but its gradients were handed out by the first backward "
                "pass; compute the loss again, or set train.loss.chunk: none"
            )
        given, ctx.gradients = ctx.gradients, None
        # In place: the head's gradient is as large as its weights.
        scaled = [g.mul_(gradient).to(dtype) for g, dtype in zip(given, ctx.dtypes, strict=True)]
        return None, None, *scaled
