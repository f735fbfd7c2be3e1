"""The trainer that LlamaFactory 0.9.5 makes for `use_hyper_parallel: true`: its own one, on a spread model."""

from __future__ import annotations

import logging
from typing import Any

from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer
from torch import Tensor, nn

from hyper_parallel.eager import Swap
from hyper_parallel.errors import IntegrationError
from hyper_parallel.integration.llamafactory.arguments import HyperParallelArguments
from hyper_parallel.integration.llamafactory.strategy import check_device, given_strategy
from hyper_parallel.integration.llamafactory.told import tell_on_one_line
from hyper_parallel.integration.rows import shifted
from hyper_parallel.integration.spread import world_size
from hyper_parallel.integration.trainer import SpreadTrainer
from hyper_parallel.integration.versions import check
from hyper_parallel.shard.loss import valid_tokens

log = logging.getLogger(__name__)

check("llamafactory", "transformers", "accelerate", "peft", "torch")
tell_on_one_line()

_WHOLE_MATRICES = {
    "use_galore": "GaLore",
    "use_apollo": "APOLLO",
    "use_badam": "BAdam",
    "use_adam_mini": "Adam-mini",
    "use_muon": "Muon",
}
"""Options of LlamaFactory that choose an optimizer which looks at whole matrices, rows or blocks."""


class HyperParallelTrainer(SpreadTrainer, CustomSeq2SeqTrainer):
    """LlamaFactory's `CustomSeq2SeqTrainer` on a model that is spread as `hp_args` say."""

    def __init__(
        self,
        hp_args: HyperParallelArguments,
        model: nn.Module,
        args: Any,
        finetuning_args: Any,
        data_collator: Any = None,
        **kwargs: Any,
    ) -> None:
        """`hp_args`: how to spread `model`; the rest is what LlamaFactory gives its own trainer.

        Raises ConfigError for what cannot be honoured: docs/llamafactory.md lists it.
        """
        world = world_size()
        check_device(hp_args, args.device.type)
        _check_options(args, finetuning_args, world)
        checkpoints = _without_checkpointing(model)
        _keep_document_numbers(data_collator)
        super().__init__(
            strategy=given_strategy(hp_args, world, checkpoints=checkpoints),
            swap=Swap(inputs=hp_args.activation_swap_inputs) if hp_args.activation_mode == "swap" else None,
            model=model,
            args=args,
            finetuning_args=finetuning_args,
            data_collator=data_collator,
            **kwargs,
        )

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As `SpreadTrainer` has it. ASFT's loss, the mean over a micro-batch, is weighed by its share of tokens."""
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        tokens: Tensor | int | None = kwargs.get("num_items_in_batch")
        if self.finetuning_args.use_asft_loss and tokens is not None:
            labels = shifted(inputs)
            assert labels is not None
            loss = loss * valid_tokens(labels) / tokens * self._spread_model.data_ranks
        return loss


def _check_options(args: Any, finetuning_args: Any, world: int) -> None:
    """Refuse by name LlamaFactory's options that a spread model cannot honour. Raises IntegrationError."""
    if getattr(args, "fp8", False):
        raise IntegrationError("fp8 cannot be used with use_hyper_parallel; train in bfloat16 (bf16: true)")
    for option, name in _WHOLE_MATRICES.items():
        if getattr(finetuning_args, option, False) and world > 1:
            raise IntegrationError(
                f"{option}: {name} looks at whole matrices, of which each of the {world} workers has a part; leave it "
                "out, or train on one worker"
            )


def _without_checkpointing(model: nn.Module) -> bool:
    """Switch off LlamaFactory's gradient checkpointing, which knows nothing of a spread model; whether it was on."""
    seen: Any = model
    if not getattr(seen, "is_gradient_checkpointing", False):
        return False
    seen.gradient_checkpointing_disable()
    return True


def _keep_document_numbers(data_collator: Any) -> None:
    """Let `neat_packing` tell documents by their numbers, [B, S], not by a mask [B, 1, S, S] that no axis can split."""
    if getattr(data_collator, "block_diag_attn", False):
        data_collator.block_diag_attn = False
