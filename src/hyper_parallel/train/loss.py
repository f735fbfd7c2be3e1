"""The training loss: cross-entropy over every valid token of a step, however the step is cut up.

    loss = Σ_valid −log softmax(logits)[label] / T

T counts the valid tokens of the whole step: all micro-batches and all data ranks. Each micro-batch divides its
own sum by the same T, so that gradients are *summed* over micro-batches and ranks and equal those of one big
batch, also when documents leave ranks with different numbers of valid tokens.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""The label of a position that bears no loss."""


def valid_tokens(labels: Tensor) -> Tensor:
    """How many labels bear loss: a zero-dim int64 tensor on the labels' device."""
    return (labels != IGNORED).sum()


def causal_lm_loss(logits: Tensor, labels: Tensor, tokens: Tensor | float) -> Tensor:
    """This micro-batch's share of the step's loss; a zero-dim fp32 tensor.

    `logits` [B, S, V] of any float dtype, computed with in fp32. `labels` [B, S] int64, already shifted: the
    label at a position is the token after it; -100 bears no loss. `tokens` is the number of valid tokens of
    the whole step, over all micro-batches and data ranks.
    """
    total = F.cross_entropy(
        logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total / tokens
