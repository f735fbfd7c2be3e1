"""Evaluation by a Trainer: the loss of the global batch, and whole logits of every row, once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.compat import fsdp
from hyper_parallel.errors import IntegrationError
from hyper_parallel.integration.batch_rows import shifted
from hyper_parallel.integration.engine_generate import EngineGenerate
from hyper_parallel.integration.last_rows import new_rows, shortened
from hyper_parallel.integration.overrides import owner_of
from hyper_parallel.integration.trainer_losses import CountedLosses
from hyper_parallel.integration.trainer_pipeline import TrainerPipeline
from hyper_parallel.shard.loss import IGNORED, causal_lm_loss, cross_entropy_sum, valid_tokens
from hyper_parallel.shard.packed_documents import documents_known


class SpreadEvaluation(CountedLosses):
    """The part of `SpreadTrainer` that evaluates and predicts."""

    _pipeline: TrainerPipeline | None = None
    _generate: EngineGenerate

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own; weights that were gathered for its last forward pass are let go of."""
        self._generate.begin()
        with fsdp.gathered_between_passes(self.model):
            return super().evaluation_loop(*args, **kwargs)

    def _new_rows(self) -> int | None:
        """How many rows of this share are no repetition in the batch that was read; None where that is all."""
        spread = self._spread_model
        return new_rows(self.accelerator.gradient_state, spread.data_index, self.args.eval_batch_size)

    @torch.no_grad()
    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor | None, Any, Any]:
        """The loss of the global batch, the same on every rank, and this share's logits and labels, whole.

        NaN where no label bears loss, as the model's own: a Trainer leaves it out of the mean.
        """
        spread = self._spread_model
        if getattr(self.args, "predict_with_generate", False) and not prediction_loss_only:
            with self._generate.in_place():
                loss, *generated = super().prediction_step(
                    model, inputs, prediction_loss_only, ignore_keys, **self._generating(kwargs)
                )
            if loss is not None and self._is_causal(inputs):
                loss = self.prediction_step(model, inputs, True)[0]
            return loss, *generated
        if self._pipeline is not None and not (prediction_loss_only and self._is_causal(inputs)):
            raise IntegrationError(
                "axes.pipeline: no rank has the logits, and only the next-token loss of held-out rows is computed; "
                "predict with the saved model (save_model), or set axes.pipeline to 1"
            )
        if not self._is_causal(inputs) or owner_of(self, "compute_loss") is not None:
            return self._own_prediction(model, inputs, prediction_loss_only, ignore_keys, **kwargs)
        inputs = self._prepare_inputs(inputs)
        if self._pipeline is not None:
            held = shifted(inputs)
            assert held is not None, "a causal loss has labels"
            held = self._without_repeated(held)
            tokens = spread.sum_of_data(valid_tokens(held))
            loss = self._pipeline.evaluate(inputs, held, tokens.clamp(min=1))
            return torch.where(tokens > 0, loss, torch.nan), None, None
        rows = self._rows(inputs)
        assert rows.labels is not None
        labels = self._without_repeated(rows.labels)
        tokens = spread.sum_of_data(valid_tokens(labels))
        with documents_known(rows.several):
            if prediction_loss_only:
                part = causal_lm_loss(
                    model, rows.input_ids, labels, rows.position_ids, tokens, self._loss_config, **rows.rest
                )
                return spread.sum_of_parts(part), None, None
            positions = {} if rows.position_ids is None else {"position_ids": rows.position_ids}
            outputs = model(input_ids=rows.input_ids, use_cache=False, **positions, **rows.rest)
        smoothing = self.args.label_smoothing_factor
        total = cross_entropy_sum(outputs.logits.flatten(0, -2), labels.flatten(), label_smoothing=smoothing)
        if ignore_keys is None:
            ignore_keys = getattr(model.config, "keys_to_ignore_at_inference", ["past_key_values"])
        kept = {key: value for key, value in outputs.items() if key not in (*ignore_keys, "loss")}
        kept["logits"] = outputs.logits[:, : rows.length]
        logits = tuple(kept.values())
        loss = spread.sum_of_data(total / tokens)
        return loss, logits[0] if len(logits) == 1 else logits, inputs["labels"]

    def _own_prediction(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor | None, Any, Any]:
        """The Trainer's own, for a loss of its own: its mean over the labels of all shares of the batch."""
        kept, spread = self._new_rows(), self._spread_model
        short: Any = shortened(dict(inputs), kept, self.args.eval_batch_size)
        held = self._labels_in(short)
        self._counts = self._said
        loss, *found = super().prediction_step(
            model, dict(inputs), prediction_loss_only, ignore_keys, **kwargs
        )
        if kept is not None and loss is not None:
            # All ranks compute it again, those that have all rows as well.
            loss = super().prediction_step(model, short, True, ignore_keys, **kwargs)[0]
        if loss is None:
            return None, *found
        part = torch.where(held > 0, loss if self._counts == "step" else loss * held, 0)
        parts = spread.data_ranks if self._counts == "step" else spread.sum_of_data(held)
        return spread.sum_of_data(part) / parts, *found

    def _generating(self, given: dict[str, Any]) -> dict[str, Any]:
        """What `generate` is told: ranks with other rows go on until all are done, for they gather weights together."""
        told = given or dict(getattr(self, "_gen_kwargs", {}))
        return {"synced_gpus": self._spread_model.data_ranks > 1, **told}

    def _without_repeated(self, labels: Tensor) -> Tensor:
        """Labels, of which rows that fill the last batch a second time bear no loss."""
        if (kept := self._new_rows()) is None:
            return labels
        rows = torch.arange(labels.size(0), device=labels.device)
        return labels.masked_fill((rows >= kept).unsqueeze(-1), IGNORED)
