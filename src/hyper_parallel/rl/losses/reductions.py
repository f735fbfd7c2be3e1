"""Masked sums of a step, divided by a count of the whole step (token and sequence normalizations of policy losses).

With l_it the term of token t of sequence i, m_it its mask, |o_i| = Σ_t m_it, N the sequences that one update trains:

    grpo      Σ_i (1 / |o_i|) Σ_t m_it l_it / N          DeepSeekMath (arXiv 2402.03300), equation 3
    bnpo      Σ_i Σ_t m_it l_it / Σ_i |o_i|              tokens of the update (TRL's name; PPO's mean over tokens)
    dr_grpo   Σ_i Σ_t m_it l_it / (N · max_length)       Dr. GRPO (arXiv 2503.20783), section 3
    dapo      Σ_i Σ_t m_it l_it / (Σ_g |o_g| / updates)  DAPO (arXiv 2503.14476), equation 8; g runs over all that was
                                                         generated for `updates` updates (TRL)

The numerators are `reduce_tokens`, the denominators `loss_count`. Both are sums over sequences: a caller adds the
counts of all micro-batches and ranks, passes the total, and adds the losses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from hyper_parallel.errors import ConfigError

Normalization = Literal["grpo", "bnpo", "dr_grpo", "dapo"]


@dataclass(frozen=True, kw_only=True)
class LossSum:
    """A micro-batch's share of the loss of a step, and sums for its metrics; both add over micro-batches and ranks."""

    loss: Tensor
    """Scalar with a gradient: a sum over the micro-batch, divided by the count of the whole step."""
    weight: Tensor
    """Scalar: the tokens, sequences or pairs that the sums run over."""
    sums: Mapping[str, Tensor]
    """Detached scalars; divided by the weight they are the means of the metrics."""


def metric_means(parts: Iterable[LossSum]) -> dict[str, float]:
    """The mean of each metric over all parts (micro-batches) that have it, weighted by their weights."""
    totals: dict[str, float] = {}
    weights: dict[str, float] = {}
    for part in parts:
        for name, value in part.sums.items():
            totals[name] = totals.get(name, 0.0) + float(value)
            weights[name] = weights.get(name, 0.0) + float(part.weight)
    return {name: total / weights[name] if weights[name] else 0.0 for name, total in totals.items()}


def loss_count(
    normalization: Normalization, mask: Tensor, *, max_length: int | None = None, updates: int = 1
) -> Tensor:
    """The denominator that sequences contribute to the loss of a step; the counts of micro-batches and ranks add.

    `mask` [sequences, tokens] has the trained tokens of the sequences of one update, or, for `dapo`, of all sequences
    that were generated for `updates` updates. A sequence counts even if none of its tokens is trained. `max_length`
    (tokens) is the longest answer that generation allows, of `dr_grpo` alone. Returns a float64 scalar. Raises
    ConfigError for an unknown normalization and for a missing or needless `max_length` or `updates`.
    """
    if normalization not in get_args(Normalization):
        raise ConfigError(
            f"got normalization {normalization!r}; need one of {', '.join(get_args(Normalization))}"
        )
    if (normalization == "dr_grpo") != (max_length is not None):
        raise ConfigError(
            f"got max_length {max_length} with normalization {normalization}; dr_grpo needs the longest answer in "
            "tokens, the others take none"
        )
    if updates < 1 or (updates > 1 and normalization != "dapo"):
        raise ConfigError(
            f"got updates {updates} with normalization {normalization}; only dapo divides a generation batch by the "
            "number of its updates, 1 or more"
        )
    trained = trained_tokens(mask)
    if normalization == "grpo":
        count = float(trained.shape[0])
    elif normalization == "dr_grpo":
        assert max_length is not None
        count = float(trained.shape[0] * max_length)
    else:
        return trained.sum(dtype=torch.float64) / updates
    return torch.tensor(count, dtype=torch.float64, device=mask.device)


def reduce_tokens(terms: Tensor, mask: Tensor, normalization: Normalization, count: float | Tensor) -> Tensor:
    """The sum of `terms` [sequences, tokens] over the trained tokens, of `grpo` of each sequence's mean, over `count`.

    A `count` of 0 means that the whole step trains no token: the sum, which is 0, is returned.
    """
    trained = trained_tokens(mask)
    kept = torch.where(trained, terms, 0.0)
    if normalization == "grpo":
        total = (kept.sum(-1) / trained.sum(-1).clamp(min=1)).sum()
    else:
        total = kept.sum()
    return divided(total, count)


def divided(total: Tensor, count: float | Tensor) -> Tensor:
    """`total` over `count`, or as it is where `count` is 0 (and the total an empty sum)."""
    divisor = torch.as_tensor(count, dtype=total.dtype, device=total.device).detach()
    return total / torch.where(divisor == 0, torch.ones_like(divisor), divisor)


def sequence_logprobs(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Sum of the log-probabilities [sequences, tokens] over the trained tokens: [sequences], in nats."""
    return torch.where(trained_tokens(mask), floats(logprobs), 0.0).sum(-1)


def trained_tokens(mask: Tensor) -> Tensor:
    """A mask of 0 and 1, or of bool, as bool. Raises ConfigError for a floating-point one, which could hold weights."""
    if mask.is_floating_point():
        raise ConfigError(
            f"got a mask of {mask.dtype}; need one of bool or of integers, 1 for a trained token (mask.bool())"
        )
    return mask != 0


def floats(values: Tensor) -> Tensor:
    """`values` as float32; float64 stays, for comparisons with finite differences."""
    return values if values.dtype == torch.float64 else values.float()


def require_shape(name: str, tensor: Tensor, like: Tensor) -> None:
    """Raises ConfigError unless the shapes are equal: broadcasting would give a loss, but another one."""
    if tensor.shape != like.shape:
        raise ConfigError(
            f"got {name} of shape {list(tensor.shape)}; need {list(like.shape)}, an entry for each of the others"
        )
