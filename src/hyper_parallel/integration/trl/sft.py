"""TRL's SFTTrainer: the mixin, and the metrics that SFTTrainer adds.

TRL prepares the data, and packs it, as ever. Its loss is the next-token loss, which a spread model computes itself; or
with `loss_type="dft"` each token's, weighed by the token's own probability (Wu et al., arXiv 2508.05629):

    loss = − Σ p(y).detach() · log p(y) / T
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import Trainer
from trl import SFTTrainer

from hyper_parallel.errors import IntegrationError
from hyper_parallel.integration.trainer import SpreadTrainer
from hyper_parallel.shard.lora_adapters import without_adapters
from hyper_parallel.shard.loss import IGNORED


class _PlainLoss(SFTTrainer):
    """SFTTrainer with the loss of Transformers' Trainer."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """TRL's own needs the whole model's logits, or a head that it put into the model."""
        return Trainer.compute_loss(self, model, inputs, *args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """TRL 1.x has its own, for its own loss."""
        return Trainer.prediction_step(self, *args, **kwargs)


class HyperParallelSFTTrainer(SpreadTrainer, _PlainLoss):
    """`trl.SFTTrainer` with one argument more, `strategy`: how HyperParallel spreads the model.

    Of its metrics `num_tokens` is logged; `entropy` and `mean_token_accuracy`, which need whole logits, are not.
    """

    compute_loss_func: Any

    def _spread(self, model: nn.Module) -> None:
        if self.args.activation_offloading:
            raise IntegrationError(
                "activation_offloading is not taken over; leave it out, and give the strategy a budget: "
                "memory: {device: …, host: …}"
            )
        # TRL 1.x puts its own head around the model's forward, which would hide what spreads it.
        without_adapters(model).__dict__.pop("forward", None)
        if getattr(self.args, "loss_type", "nll") == "dft" and self.compute_loss_func is None:
            self.compute_loss_func = dft_loss
        super()._spread(model)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As `SpreadTrainer`'s; the tokens that were read are counted."""
        self._counted(inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _counted(self, inputs: Mapping[str, Any]) -> None:
        if self.model.training:
            mask = inputs.get("attention_mask")
            read = (
                (mask != 0).sum() if isinstance(mask, Tensor) else torch.tensor(inputs["input_ids"].numel())
            )
            total = self._spread_model.sum_of_data(read.to(self.args.device))
            self._total_train_tokens += int(total)
        self._metrics["train" if self.model.training else "eval"]["num_tokens"] = [self._total_train_tokens]


def dft_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """The loss above of whole logits [B, S, V] and labels int64 [B, S], over `num_items_in_batch` tokens."""
    targets = labels[:, 1:].contiguous()
    loss = cross_entropy(
        outputs.logits[:, :-1].transpose(1, 2).float(), targets, reduction="none", ignore_index=IGNORED
    )
    weighed = loss * (-loss).exp().detach()
    tokens = (targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    return weighed.sum() / tokens
