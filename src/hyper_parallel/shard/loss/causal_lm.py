"""The training loss of a causal language model, however its step is cut up.

    loss = Σ_valid loss of a token / T

T counts the valid tokens of the whole step: all micro-batches and all ranks. Each micro-batch divides its own sum by
the same T, so that gradients are *summed* over micro-batches and ranks and equal those of one big batch, also when
documents leave ranks with different numbers of valid tokens.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hyper_parallel.config.train import LossConfig
from hyper_parallel.graph.phase import phase
from hyper_parallel.shard.loss.forward import call, logits_in
from hyper_parallel.shard.loss.root import Request, root_of
from hyper_parallel.shard.loss.vocab_parallel_cross_entropy import cross_entropy_sum


def causal_lm_loss(
    model: nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    position_ids: Tensor | None,
    tokens: Tensor | float,
    options: LossConfig | None = None,
    *,
    micro_batches: int = 1,
    **inputs: Any,
) -> Tensor:
    """This rank's part of the step's loss, in nats: a zero-dim fp32 tensor. The sum over `LOSS_AXES` is the loss.

    `input_ids`, `position_ids` and `labels` int64 [B, S], whole rows on every rank. `labels` are shifted already: the
    label at a position is the token after it; -100 bears no loss. `tokens` is the number of valid tokens of the
    whole step. `options` is `train.loss` of a run file. `inputs`: what else the model takes (`pixel_values`).

    While it trains, a mixture of experts whose config asks for it (`output_router_logits`) adds its auxiliary loss,
    the mean over the `micro_batches` of the step.

    A Transformers model computes its logits a chunk of positions at a time (`options.chunk`), split over the
    vocabulary where its head is; their gradients are taken in this forward pass, and can be handed out once. Any other
    module, and one that was not parallelized, computes them at once. Without gradients enabled it is only the value.
    """
    options = options or LossConfig()
    root = root_of(model)
    if root is not None:
        with root.requested(Request(labels, tokens, options, micro_batches)):
            loss: Tensor = call(model, input_ids, position_ids, **inputs)
            return loss
    logits = logits_in(call(model, input_ids, position_ids, **inputs))
    with phase("loss"):
        total = cross_entropy_sum(
            logits.flatten(0, -2),
            labels.flatten(),
            label_smoothing=options.label_smoothing,
            z_loss=options.z_loss,
        )
        return total / tokens
