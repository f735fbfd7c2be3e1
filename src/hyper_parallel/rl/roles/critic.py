"""PPO's critic: Transformers' token classifier of the policy's family with one class, on the actor's ranks.

The value at a position is that of the state in which the next token is drawn, so that it stands where the token's label
does. It begins as a copy of the policy with a head of zeros: every value is 0 before the first update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.config.rl import RLConfig
from hyper_parallel.errors import NonFiniteError, UnsupportedModelError
from hyper_parallel.rl.losses.policy import value_loss
from hyper_parallel.rl.roles.policy_update import (
    MicroRows,
    add_gradients,
    mask_of,
    micro_batches,
    on_all_ranks,
    update,
)
from hyper_parallel.rl.sample import Sample
from hyper_parallel.rl.weights.merged_adapters import sent_tensors
from hyper_parallel.shard import init_weights, parallelize, sharded
from hyper_parallel.shard.process_mesh import LOSS_AXES
from hyper_parallel.step.optimizer import build_optimizer


class Critic:
    """The value model on this rank."""

    def __init__(self, config: RLConfig, policy: Any, device: torch.device) -> None:
        """`policy`: the actor's parallelized model. Raises UnsupportedModelError for a family without a token
        classifier."""
        self._config, self._rl, self._device = config, config.rl, device
        strategy = config.roles.actor.strategy
        self.model = _classifier(policy, getattr(torch, strategy.precision.param))
        parallelize(self.model, strategy)
        init_weights(self.model, config.seed, device)
        self.handle = sharded(self.model)
        self.copy(policy)
        given = config.rl.optimizer
        self.optimizer = build_optimizer(self.model, given.model_copy(update={"lr": config.rl.critic.lr}))

    def copy(self, policy: nn.Module) -> None:
        """Take the policy's layers, their adapters merged, and a head of zeros."""
        given = sent_tensors(policy)
        with torch.no_grad():
            for one in self.handle.owned():
                if one.name in given:
                    one.local.copy_(given[one.name])
                else:
                    one.local.zero_()

    def values(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Of each sample's tokens, on every rank."""
        self.model.eval()
        with torch.no_grad():
            found = [
                (one, self._of(one))
                for one in micro_batches(samples, self.handle, self._rl.micro_batch, self._device)
            ]
        return on_all_ranks(found, samples, self.handle)

    def train(
        self, samples: Sequence[Sample], old: Sequence[Sequence[float]], returns: Sequence[Sequence[float]]
    ) -> dict[str, float]:
        """One update on some samples with the values of before the batch and the returns of their tokens.

        Raises NonFiniteError where the gradient is not finite; nothing is updated then."""
        model = self.model.train()
        count = float(mask_of(samples).sum())
        micro = micro_batches(samples, self.handle, self._rl.micro_batch, self._device)
        total = torch.zeros(2, dtype=torch.float64)

        def loss(one: MicroRows) -> Tensor:
            found = value_loss(
                self._of(one),
                old_values=one.placed(old),
                returns=one.placed(returns),
                mask=_trained(one),
                count=count,
                clip=self._rl.critic.clip,
            )
            error = found.sums["value_error"] / max(count, 1)
            total.add_(torch.stack([found.loss.detach(), error]).double().cpu())
            return found.loss

        add_gradients(self.handle, micro, loss, self._device, seed=self._config.seed)
        norm = self.handle.grad_norm()
        value, error = self.handle.all_reduce(total.to(self._device), LOSS_AXES).tolist()
        if not torch.isfinite(norm):
            model.zero_grad(set_to_none=True)
            raise NonFiniteError("the critic's gradient is not finite; lower rl.critic.lr")
        update(model, self.optimizer, norm, self._rl.grad_clip)
        return {"value_loss": value, "value_error": error}

    def _of(self, one: MicroRows) -> Tensor:
        rows = one.rows
        found: Tensor = self.model(rows.input_ids, position_ids=rows.position_ids, use_cache=False).logits
        return found[..., 0]


def _trained(one: MicroRows) -> Tensor:
    """bool [B, S]: the policy drew the next token of an answer that has a reward."""
    known = torch.tensor([[sample.reward is not None] for sample in one.samples])
    return one.rows.drawn & known.to(one.rows.labels.device)


def _classifier(policy: Any, dtype: torch.dtype) -> nn.Module:
    from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, AutoModelForTokenClassification

    config = type(policy.config).from_dict({**policy.config.to_dict(), "num_labels": 1})
    if type(config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        raise UnsupportedModelError(
            f"Transformers has no token classifier of {config.model_type}, which PPO's critic is; take rl.algorithm: "
            "grpo"
        )
    with torch.device("meta"):
        model = AutoModelForTokenClassification.from_config(
            config, dtype=dtype, attn_implementation=policy.config._attn_implementation
        )
    for module in model.modules():
        # Some families put a dropout of their own before the head.
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert isinstance(model, nn.Module)
    return model
