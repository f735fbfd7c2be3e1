"""Cross-entropy over logits that an axis splits along the vocabulary, summed over positions.

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

import torch
from torch import Tensor

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
