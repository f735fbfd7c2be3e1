"""Submodels in a run: steps on rows of images or sound, with parts of the model on devices of their own.

`hp.submodels` is given rows by their numbers, and makes of the rows of a micro-batch what the model takes when it
computes them: the processor puts tensors of several rows together as the model expects it. All rows of a step have the
same length, that of the longest of the data.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.config import RunConfig
from hyper_parallel.data import MultimodalData, TrainingData
from hyper_parallel.data.multimodal import MediaPrompt
from hyper_parallel.errors import ConfigError
from hyper_parallel.shard.lora_adapters import without_adapters
from hyper_parallel.shard.loss import IGNORED, valid_tokens
from hyper_parallel.step.batches import StepBatch
from hyper_parallel.step.micro_batch import PLACE
from hyper_parallel.step.submodels import Submodels, submodels

_ROW = "row"
"""The name of the numbers of rows among their tensors."""


@dataclass(frozen=True)
class WholeBatch(StepBatch):
    """A step's rows, all of them on every rank."""

    whole: Mapping[str, Tensor] = field(default_factory=dict)


class SubmodelBatches:
    """The training data, a pure function of the number of rows consumed before: as `Batches`, but whole."""

    def __init__(self, data: MultimodalData, batch: int, model: nn.Module) -> None:
        self._rows, self._held_out = data.train, data.eval
        self._order, self._batch = data.order, batch
        self._length = data.train.positions(range(len(data.train)))
        self._held_out_length = data.eval.positions(range(len(data.eval))) if len(data.eval) else 0
        self._one = functools.lru_cache(maxsize=2 * batch)(lambda row: self._made((row,)))
        core: Any = without_adapters(model)
        self._rope = getattr(getattr(core, core.base_model_prefix, None), "get_rope_index", None)
        self.data_index = 0
        """Of this rank in its submodel, once that is known."""
        self.prompt: MediaPrompt | None = None
        """Of rows with a ``place``: those of a sample."""

    def largest(self) -> dict[str, Tensor]:
        """A step's rows with the most media, which need every submodel."""
        costs = [self._rows.cost(row) for row in range(len(self._rows))]
        order = sorted(range(len(costs)), key=lambda row: (costs[row].values, costs[row].media), reverse=True)
        return self._whole([order[at % len(order)] for at in range(self._batch)])

    def load(self, step: int, consumed: int) -> WholeBatch:
        """The batch of `step`, before which `consumed` rows were consumed."""
        rows = self._order.rows(consumed, self._batch)
        whole = self._whole(rows)
        # Of the data ranks of a submodel, which all have the rows, the first speaks.
        tokens = valid_tokens(whole["labels"]).float() * float(self.data_index == 0)
        return WholeBatch(step, rows, [], tokens, whole)

    def positions(self, consumed: int) -> int:
        """Positions of a batch, padding included."""
        return self._batch * self._length

    def held_out(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Rows of a batch that is evaluated; where they end before the batch does, it is filled up with rows that bear
        no loss."""
        first = len(self._rows)
        filled = [first + row for row in (*rows, *[0] * (self._batch - len(rows)))]
        whole = self._whole(filled)
        whole["labels"][len(rows) :] = IGNORED
        return whole

    def inputs(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the model takes of some rows."""
        device = next(iter(rows.values())).device  # an estimate has only the rows' numbers
        if PLACE in rows:
            assert self.prompt is not None, "a sample goes on from a prompt"
            ids = rows["input_ids"].cpu()
            one = self.prompt.inputs(ids[0].tolist())
            made = {name: torch.cat([value] * len(ids)) for name, value in one.items()}
            made[PLACE] = rows[PLACE][:1]
        else:
            numbers = tuple(rows[_ROW].tolist())
            made = dict(self._one(numbers[0]) if len(numbers) == 1 else self._made(numbers))
            del made["labels"]
            # Padding stands behind, where no token attends to it.
            del made["attention_mask"]
        made["position_ids"] = self._positions(made)
        made.pop("mm_token_type_ids", None)
        return {name: one.to(device) for name, one in made.items()}

    def _positions(self, made: Mapping[str, Tensor]) -> Tensor:
        """Of each token, or three of each as the model's own code makes them."""
        ids = made["input_ids"]
        counted = torch.arange(ids.size(1)).repeat(ids.size(0), 1)
        if self._rope is None:
            return counted
        if not any(one.is_floating_point() for one in made.values()):
            return counted.expand(3, -1, -1)
        taken = inspect.signature(self._rope).parameters
        found: Tensor = self._rope(**{name: one for name, one in made.items() if name in taken})[0]
        return found

    def _whole(self, rows: Sequence[int]) -> dict[str, Tensor]:
        made = [self._one(row) for row in rows]
        found = {name: torch.cat([one[name] for one in made]) for name in ("input_ids", "labels")}
        return {**found, _ROW: torch.tensor(rows)}

    def _made(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Of training, or held out: their numbers go on behind those of training."""
        first = len(self._rows)
        if rows[0] < first:
            return self._rows.batch(rows, self._length)
        return self._held_out.batch([row - first for row in rows], self._held_out_length)


@dataclass
class BuiltSubmodels:
    """What the ranks of a run with submodels compute."""

    parts: Submodels
    batches: SubmodelBatches
    held_out: int
    """Rows that are evaluated."""
    batch: int
    """Rows of a step."""

    def train(self, batch: StepBatch, tokens: Tensor) -> Tensor:
        """As of `step.train_step.Accumulate`. The loss is that of the whole step: one rank speaks for all."""
        assert isinstance(batch, WholeBatch)
        loss = self.parts.forward_backward(batch.whole, step=batch.step)
        return loss * float(self.parts.handle.rank == 0)

    def next_logits(self, prompt: MediaPrompt, ids: Sequence[int], place: int) -> Tensor:
        """The logits of the token behind a place of a row that begins with a prompt, fp32 [V], on every rank. A
        collective."""
        self.batches.prompt = prompt
        row = torch.tensor([ids])
        return self.parts.next_logits({"input_ids": row, "labels": row, PLACE: torch.tensor([place])})

    def evaluate(self, ends: Callable[[], bool]) -> float | None:
        """As `train.evaluate.Evaluation.loss`; None also where nothing is held out."""
        if not self.held_out:
            return None
        loss, tokens = torch.zeros(2)
        for first in range(0, self.held_out, self.batch):
            if ends():
                return None
            whole = self.batches.held_out(range(first, min(first + self.batch, self.held_out)))
            loss += self.parts.evaluate(whole, tokens=1.0).cpu()
            tokens += valid_tokens(whole["labels"])
        return float(loss / tokens)


def build_submodels(
    config: RunConfig, model: nn.Module, data: TrainingData, device: torch.device | str
) -> BuiltSubmodels:
    """Spread the submodels of a run's model over its ranks. A collective. Raises ConfigError and StrategyError."""
    check_submodels(config, data)
    assert isinstance(data, MultimodalData)
    strategy, train = config.effective_strategy, config.train
    batches = SubmodelBatches(data, train.batch, model)
    parts = submodels(
        model,
        strategy.submodels,
        batches.largest(),
        micro_batches=train.batch // rows_of_micro_batch(config),
        strategy=strategy.model_copy(update={"submodels": {}}),
        inputs=batches.inputs,
        seed=config.seed,
        loss=train.loss,
        device=device,
    )
    batches.data_index = parts.handle.data_index
    held_out = min(len(data.eval), train.eval.batches * train.batch)
    return BuiltSubmodels(parts, batches, held_out, train.batch)


def rows_of_micro_batch(config: RunConfig) -> int:
    """Rows of a micro-batch over the data ranks of each submodel; by default as few as these divide."""
    ranks = math.lcm(*(one.axes.data for one in config.effective_strategy.submodels.values()))
    rows = config.train.micro_batch or ranks
    if rows % ranks or config.train.batch % rows:
        raise ConfigError(
            f"strategy.submodels: a micro-batch of {rows} rows (train.micro_batch) must be a multiple of {ranks}, the "
            f"data ranks of the submodels, and divide train.batch ({config.train.batch})"
        )
    return rows


def check_submodels(config: RunConfig, data: TrainingData) -> None:
    """Raise ConfigError for what a run with submodels cannot do."""
    if not isinstance(data, MultimodalData):
        raise ConfigError(
            "strategy.submodels trains rows with images or sound, and data.train has none; use axes, or hp.submodels "
            "in a loop of your own (docs/submodels.md)"
        )
    if config.train.router_bias_rate:
        raise ConfigError(
            "strategy.submodels does not correct routers' biases; leave train.router_bias_rate out"
        )
