"""Losses of a Trainer over ranks, in training and evaluation: how each counts follows from who computed it.

| Who | What it is | Sum over ranks |
|---|---|---|
| ours, of the next token | this rank's part of the step's loss | over loss ranks |
| a function that takes the step's number of labels | divided by it already | over data ranks |
| all others | a mean over the rank's own labels | over data ranks, by their numbers |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hyper_parallel.compat import fsdp
from hyper_parallel.config.train import LossConfig
from hyper_parallel.errors import IntegrationError
from hyper_parallel.integration.batch_rows import (
    FewLengths,
    NoRows,
    Rows,
    new_rows,
    rows_of,
    shifted,
    shortened,
)
from hyper_parallel.integration.engine_generate import EngineGenerate
from hyper_parallel.integration.saving import SpreadSaving
from hyper_parallel.integration.trainer_arguments import has_next_token_loss, owner_of
from hyper_parallel.integration.trainer_pipeline import TrainerPipeline
from hyper_parallel.shard.forward import documents_known
from hyper_parallel.shard.loss import IGNORED, causal_lm_loss, cross_entropy_sum, valid_tokens

_Counts = Literal["part", "step", "mean"]
"""How a loss is to be summed over ranks: it is this rank's part; it is divided by what the step has; it is a mean over
the rank's own labels."""


class CountedLosses(SpreadSaving):
    """The part of `SpreadTrainer` that knows what a loss is a sum or a mean of."""

    _counts: _Counts = "mean"
    """Of the loss that was computed last."""
    _lengths: FewLengths | None = None

    @property
    def _said(self) -> _Counts:
        """How a loss counts that a subclass computes by itself."""
        return "step" if getattr(self, "loss_is_scaled_for_ga", None) else "mean"

    @property
    def _is_part(self) -> bool:
        return self._counts == "part"

    def _weight(self, inputs: Mapping[str, Any]) -> Tensor:
        """By how much more than the mean of all ranks this one's loss counts: by its labels, where others have more or
        fewer. A collective, but for losses that the step's number of labels has divided."""
        if self._counts == "step":
            return torch.tensor(float(not isinstance(inputs, NoRows)), device=self.args.device)
        spread, own = self._spread_model, self._labels_in(inputs)
        return own * spread.data_ranks / spread.sum_of_data(own).clamp(min=1)

    def _labels_in(self, inputs: Mapping[str, Any]) -> Tensor:
        """How many labels bear loss, or rows, where a label is no class: a zero-dim float32 tensor on the device."""
        count: Tensor | int = next((len(x) for x in inputs.values() if isinstance(x, Tensor) and x.dim()), 1)
        labels = shifted(inputs) if has_next_token_loss(self.model) else inputs.get("labels")
        if isinstance(inputs, NoRows):
            count = 0
        elif isinstance(labels, Tensor) and not labels.is_floating_point():
            count = valid_tokens(labels)
        return torch.as_tensor(count, dtype=torch.float32, device=self.args.device)

    @property
    def _loss_config(self) -> LossConfig:
        return LossConfig(label_smoothing=self.args.label_smoothing_factor)

    def _is_causal(self, inputs: Mapping[str, Any]) -> bool:
        """Whether the loss of these inputs is the next-token loss of a causal language model."""
        if self.compute_loss_func is not None or "input_ids" not in inputs:
            return False
        if inputs.get("labels") is None and inputs.get("shift_labels") is None:
            return False
        return has_next_token_loss(self.model)

    def _is_of_step(self, num_items_in_batch: Any) -> bool:
        """Whether a caller's own loss is divided by what the step has, not its micro-batch; as Trainer takes it."""
        # Transformers before 5.15 has no such attribute.
        given = getattr(self, "loss_is_scaled_for_ga", None)
        if given is not None:
            return bool(given)
        counted = num_items_in_batch is not None and self.model_accepts_loss_kwargs
        return counted or self.compute_loss_func is not None

    def _rows(self, inputs: Mapping[str, Any]) -> Rows:
        length = None
        if self._lengths is not None and torch.is_grad_enabled():
            # Of few lengths, since each has its own plan.
            length = self._lengths.length(inputs["input_ids"].size(1))
        return rows_of(inputs, self._spread_model.handle, self._padding_token, length=length)

    @property
    def _padding_token(self) -> int:
        return getattr(self.processing_class, "pad_token_id", None) or 0

    def _row_numbers(self, inputs: Mapping[str, Any], micro: int) -> Tensor | None:
        """int64 [B]: which rows of the step these are, in the order in which one process would read them."""
        first = next((value for value in inputs.values() if isinstance(value, Tensor) and value.dim()), None)
        if first is None:
            return None
        spread = self._spread_model
        begin = (micro * spread.data_ranks + spread.data_index) * self._train_batch_size
        return torch.arange(begin, begin + first.size(0), device=self.args.device)


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
        """The Trainer's own loss: its mean over the labels of all shares of the batch."""
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
        """Arguments of `generate`: ranks with other rows go on until all are done, for they gather weights together."""
        arguments = given or dict(getattr(self, "_gen_kwargs", {}))
        return {"synced_gpus": self._spread_model.data_ranks > 1, **arguments}

    def _without_repeated(self, labels: Tensor) -> Tensor:
        """Labels, without those of rows that fill the last batch a second time."""
        if (kept := self._new_rows()) is None:
            return labels
        rows = torch.arange(labels.size(0), device=labels.device)
        return labels.masked_fill((rows >= kept).unsqueeze(-1), IGNORED)
