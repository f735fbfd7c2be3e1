"""Cross-entropy over logits that an axis splits along the vocabulary, objectives of single tokens, and chunked sums.

With x the logits of one position, t its label, V the size of the whole vocabulary, ε the label smoothing and ζ the
z-loss coefficient:

    lse  = log Σ_c exp(x_c)
    loss = lse − (1 − ε) x_t − ε/V Σ_c x_c + ζ lse²
    ∂loss/∂x_c = softmax(x)_c (1 + 2 ζ lse) − (1 − ε) [c = t] − ε/V

Splitting the vocabulary: Megatron-LM (arXiv 1909.08053, section 3). Two collectives of a number or three a position:
the maximum of the ranks' own log-sum-exps, and the sum of what each has. Label smoothing is PyTorch's
(`torch.nn.functional.cross_entropy`); z-loss is PaLM's (arXiv 2204.02311, section 5). All arithmetic is fp32 for
logits of a lower precision; what is kept for the backward pass is the logits themselves and one lse a position.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from hyper_parallel.compat import collectives
from hyper_parallel.compat.local_tensor import is_simulated, per_rank_int
from hyper_parallel.shard.mesh_axis import Axis

IGNORED = -100
"""The label of a position that bears no loss."""


def valid_tokens(labels: Tensor) -> Tensor:
    """How many labels bear loss: a zero-dim int64 tensor on the labels' device."""
    return (labels != IGNORED).sum()


def cross_entropy_sum(
    logits_NV: Tensor,
    labels_N: Tensor,
    *,
    vocabulary: Axis | None = None,
    size: int | None = None,
    positions: Axis | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The loss summed over the positions, in nats: a zero-dim tensor of fp32, or of fp64 for fp64 logits.

    `logits_NV` [N, V_local]: this rank's chunk, by `Axis.interval`, of a vocabulary of `size` tokens that the axis
    `vocabulary` splits; it may be empty. Without `vocabulary`: the whole. `labels_N` int64 [N]: tokens of the whole
    vocabulary, or -100 for positions without loss. `positions`: an axis that splits the positions; the sum is then over
    all of its ranks, each with its own N. The result is the same on all ranks of both axes; gradients reach this rank's
    logits.

    A label outside the vocabulary is an error where the vocabulary is whole, and makes the loss NaN where it is split,
    since no rank can detect it without waiting for the device.
    """
    axis, whole = _split(logits_NV, vocabulary, size)
    total: Tensor = _CrossEntropy.apply(logits_NV, labels_N, axis, whole, label_smoothing, z_loss, True)
    return total if positions is None else positions.reduce(total)


def log_probabilities(
    logits_NV: Tensor, labels_N: Tensor, *, vocabulary: Axis | None = None, size: int | None = None
) -> Tensor:
    """The natural logarithm of the probability of each label: fp32 [N], or fp64 for fp64 logits; 0 where a label is
    -100. The arguments are those of `cross_entropy_sum`."""
    axis, whole = _split(logits_NV, vocabulary, size)
    loss_N: Tensor = _CrossEntropy.apply(logits_NV, labels_N, axis, whole, 0.0, 0.0, False)
    return -loss_N


def _split(logits_NV: Tensor, vocabulary: Axis | None, size: int | None) -> tuple[Axis | None, int]:
    """The axis that splits the vocabulary, None where it is whole, and the size of all of it."""
    axis = vocabulary if vocabulary is not None and vocabulary.size > 1 else None
    assert axis is None or size is not None, "the size of a vocabulary that is split"
    return axis, size if size is not None and axis is not None else logits_NV.size(-1)


class _CrossEntropy(torch.autograd.Function):
    """The formulas of this module's heading."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def,override]
        ctx,
        logits_NV: Tensor,
        labels_N: Tensor,
        axis: Axis | None,
        size: int,
        smoothing: float,
        z_loss: float,
        summed: bool,
    ) -> Tensor:
        x_NV, valid_N = _arithmetic(logits_NV), labels_N != IGNORED
        here_N, at_N1 = _owned(labels_N, valid_N, axis, size)
        found_N = _padded(x_NV, axis).gather(-1, at_N1).squeeze(-1).masked_fill(~here_N, 0)
        if axis is not None:
            found_N = found_N.masked_fill((labels_N < 0) | (labels_N >= size), torch.nan)
        lse_N = torch.logsumexp(x_NV, -1)
        mean_N = x_NV.sum(-1) / size if smoothing else None
        if axis is not None:
            lse_N, found_N, mean_N = _over(axis, lse_N, found_N, mean_N)
        loss_N = lse_N - (1 - smoothing) * found_N
        if mean_N is not None:
            loss_N = loss_N - smoothing * mean_N
        if z_loss:
            loss_N = loss_N + z_loss * lse_N.square()
        ctx.save_for_backward(logits_NV, lse_N, valid_N, here_N, at_N1)
        ctx.axis, ctx.size, ctx.smoothing, ctx.z_loss = axis, size, smoothing, z_loss
        loss_N = loss_N.masked_fill(~valid_N, 0)
        return loss_N.sum() if summed else loss_N

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def,override]
        logits_NV, lse_N, valid_N, here_N, at_N1 = ctx.saved_tensors
        scale_N = torch.where(valid_N, gradient, torch.zeros_like(gradient))
        # One tensor of the logits' size in fp32, changed in place.
        p_NV = torch.sub(logits_NV, lse_N.unsqueeze(-1)).exp_()
        p_NV.mul_((scale_N * (1 + 2 * ctx.z_loss * lse_N)).unsqueeze(-1))
        # Not by a product with zero: where no loss is borne the logits may be infinite.
        p_NV.masked_fill_(~valid_N.unsqueeze(-1), 0)
        if ctx.smoothing:
            p_NV.sub_((scale_N * (ctx.smoothing / ctx.size)).unsqueeze(-1))
        target_N = torch.where(here_N, scale_N * (ctx.smoothing - 1), torch.zeros_like(scale_N))
        padded = _padded(p_NV, ctx.axis)
        padded.scatter_add_(-1, at_N1, target_N.to(padded.dtype).unsqueeze(-1))
        p_NV = padded.narrow(-1, 0, logits_NV.size(-1)) if padded is not p_NV else p_NV
        return p_NV.to(logits_NV.dtype), None, None, None, None, None, None


def _arithmetic(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _owned(labels_N: Tensor, valid_N: Tensor, axis: Axis | None, size: int) -> tuple[Tensor, Tensor]:
    """Whether this rank holds the label's logit, and where among its own; 0 where it does not."""
    if axis is None:
        return valid_N, labels_N.masked_fill(~valid_N, 0).unsqueeze(-1)
    start = per_rank_int(lambda rank: axis.interval(size, rank)[0])
    stop = per_rank_int(lambda rank: axis.interval(size, rank)[1])
    here_N = (labels_N >= start) & (labels_N < stop) & valid_N
    return here_N, (labels_N - start).masked_fill(~here_N, 0).unsqueeze(-1)


def _padded(x_NV: Tensor, axis: Axis | None) -> Tensor:
    """With one more column where a rank may have none, so that index 0 is there to be read and written."""
    empty = axis is not None and (is_simulated() or x_NV.size(-1) == 0)
    return torch.nn.functional.pad(x_NV, (0, 1)) if empty else x_NV


def _over(
    axis: Axis, lse_N: Tensor, found_N: Tensor, mean_N: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The log-sum-exp, the label's logit and the mean over the whole vocabulary, from each rank's part of them."""
    top_N = collectives.all_reduce(lse_N, axis.group, "max")
    parts = [torch.exp(lse_N - top_N), found_N, *([] if mean_N is None else [mean_N])]
    sums = collectives.all_reduce(torch.stack(parts), axis.group)
    return top_N + torch.log(sums[0]), sums[1], sums[2] if mean_N is not None else None


_ATTRIBUTE = "_hyper_parallel_split_logits"


def leaves_split(module: nn.Module) -> bool:
    """Whether the module is an output head whose logits are wanted as each rank computes them, not gathered."""
    return bool(module.__dict__.get(_ATTRIBUTE, False))


@contextlib.contextmanager
def split_logits(head: nn.Module) -> Iterator[None]:
    """Inside, `head` leaves its logits split over the vocabulary."""
    head.__dict__[_ATTRIBUTE] = True
    try:
        yield
    finally:
        del head.__dict__[_ATTRIBUTE]


# Objectives that are a sum over tokens of a function of each token's log-probability: those of reinforcement learning.
#
#     loss = Σ_t f(log p_t, inputs_t)
#
# Since each token's part needs its own position only, the loss is computed a chunk of positions at a time, like the
# cross-entropy.


class TokenObjective(Protocol):
    """An objective in the place of the cross-entropy in a forward pass."""

    @property
    def temperature(self) -> float:
        """Logits are divided by it."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """[B, S] each, aligned with the labels, of whole rows."""

    def __call__(self, logprobs_N: Tensor, *inputs_N: Tensor) -> Tensor:
        """The loss of these positions, zero-dim, from the fp32 log-probabilities of their labels; those of labels that
        are -100 are 0."""


# Chunked loss: a sum over position chunks, each with its gradient at once.
#
# What a chunk needs for its backward pass, its logits first of all, is gone before the next chunk begins, and the head
# is computed once (Liger-Kernel's fused linear cross-entropy, arXiv 2410.10989, section 3.2, for any head). The
# backward pass hands out what was taken, scaled.

Loss = Callable[[Tensor, int, int], Tensor]
"""(hidden [1, C, h], first position, last position + 1) to the zero-dim loss of these positions."""


def chunked_sum(loss: Loss, hidden_NH: Tensor, weights: Sequence[Tensor], chunk: int) -> Tensor:
    """Σ over chunks of `chunk` positions of `loss`, a zero-dim tensor with gradients to `hidden_NH` and `weights`.

    `hidden_NH` [N, h]. `weights`: the tensors, beside its argument, that `loss` may compute with and whose gradient
    is wanted; with more than one chunk theirs are summed in fp32. Without gradients it is only the sum.
    """
    bounds = [(at, min(at + chunk, hidden_NH.size(0))) for at in range(0, hidden_NH.size(0), chunk)]
    with_gradients = torch.is_grad_enabled()
    wanted = [weight for weight in weights if weight.requires_grad] if with_gradients else []
    if not wanted and not (with_gradients and hidden_NH.requires_grad):
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
