"""The loss of a `TokenObjective`, and log-probabilities, of a parallelized causal language model."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hyper_parallel.config.train import LossConfig
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.loss.forward import call
from hyper_parallel.shard.loss.root import Request, root_of
from hyper_parallel.shard.loss.token_objective import TokenObjective
from hyper_parallel.shard.sharded_model import sharded


def token_loss(
    model: nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    position_ids: Tensor,
    objective: TokenObjective,
    *,
    micro_batches: int = 1,
    chunk: LossConfig | None = None,
) -> Tensor:
    """This rank's part of the objective, a zero-dim fp32 tensor with gradients.

    `input_ids`, `labels` and `position_ids` int64 [B, S]; a label is the token after its position, or -100 for none.
    Raises StrategyError for a model that does not compute its own loss (`apply_loss`).
    """
    root = root_of(model)
    if root is None:
        raise StrategyError(
            f"{type(model).__name__} has no output head that is found; log-probabilities need a causal language model "
            "of Transformers that was parallelized"
        )
    with root.requested(Request(labels, 1.0, chunk or LossConfig(), micro_batches, objective)):
        loss: Tensor = call(model, input_ids, position_ids)
        return loss


def token_logprobs(
    model: nn.Module, input_ids: Tensor, labels: Tensor, position_ids: Tensor, temperature: float = 1.0
) -> Tensor:
    """Log-probabilities of the labels at a temperature, fp32 [B, S] without gradients; 0 where a label is -100.

    Raises StrategyError as `token_loss`, and where `context` splits rows.
    """
    if sharded(model).mesh.size("context") > 1:
        raise StrategyError("axes.context: log-probabilities are not computed over split rows; leave it out")
    kept = _Kept(temperature)
    with torch.no_grad():
        token_loss(model, input_ids, labels, position_ids, kept)
    return torch.cat(kept.found).view(labels.shape)


@dataclass
class _Kept:
    """Keeps what it is given."""

    temperature: float
    inputs: tuple[Tensor, ...] = ()
    found: list[Tensor] = field(default_factory=list)

    def __call__(self, logprobs_N: Tensor, *inputs_N: Tensor) -> Tensor:
        self.found.append(logprobs_N)
        return logprobs_N.sum()
