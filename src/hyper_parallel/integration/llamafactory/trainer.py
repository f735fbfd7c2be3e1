"""The trainer that LlamaFactory 0.9.5 makes for `use_hyper_parallel: true`: its own one, on a spread model."""

from __future__ import annotations

from typing import Any

from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer
from torch import Tensor, nn

from hyper_parallel.integration.batch_rows import shifted
from hyper_parallel.integration.llamafactory.arguments import (
    HyperParallelArguments,
    check_device,
    check_options,
    check_stages,
    keep_document_numbers,
    strategy_from_arguments,
    without_checkpointing,
)
from hyper_parallel.integration.llamafactory.error_lines import one_line_errors
from hyper_parallel.integration.parallel_run import world_size
from hyper_parallel.integration.trainer import SpreadTrainer
from hyper_parallel.integration.versions import check
from hyper_parallel.offloading.autograd import Swap
from hyper_parallel.shard.loss import valid_tokens

check("llamafactory", "transformers", "accelerate", "peft", "torch")
one_line_errors()


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
        check_options(args, finetuning_args, model, world)
        check_stages(args, finetuning_args, hp_args.pp_size)
        checkpoints = without_checkpointing(model)
        keep_document_numbers(data_collator)
        super().__init__(
            strategy=strategy_from_arguments(hp_args, world, checkpoints=checkpoints),
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
