"""How a Trainer's loss counts over ranks, which follows from who computed it.

| Who | What it is | Sum over ranks |
|---|---|---|
| ours, of the next token | this rank's part of the step's loss | over loss ranks |
| a function that is told the step's number of labels | divided by it already | over data ranks |
| all others | a mean over the rank's own labels | over data ranks, by their numbers |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from hyper_parallel.config.train import LossConfig
from hyper_parallel.integration.batch_rows import Rows, rows_of, shifted
from hyper_parallel.integration.causal_models import has_next_token_loss
from hyper_parallel.integration.few_lengths import FewLengths
from hyper_parallel.integration.last_rows import NoRows
from hyper_parallel.integration.saving import SpreadSaving
from hyper_parallel.shard.loss import valid_tokens

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
            # Of few lengths, since each has a plan of its own.
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
