"""Pipelines in a training loop of the user's own: forward and backward pass of a step's micro-batches as one call.

    pipeline = hp.pipeline(model, strategy, rows=2, length=128, micro_batches=8)
    loss = pipeline.forward_backward(input_ids, labels)

A pipeline has no model output whose `backward()` could be called: a rank holds some of the stages, and the schedule
orders forward and backward passes of several micro-batches. With L(x) the loss of a token,

    loss = Σ L / T,      T = valid tokens of all micro-batches on all ranks

so that gradients and loss are those of one device, whatever the number of tokens in each micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hyper_parallel.config.train import LossConfig
from hyper_parallel.errors import DataError, StrategyError
from hyper_parallel.shard import ShardedModel, parallelize, sharded
from hyper_parallel.shard.forward import documents_known, inference, several_documents
from hyper_parallel.shard.loss import causal_lm_loss, valid_tokens
from hyper_parallel.shard.plan.plan import check_length
from hyper_parallel.shard.process_mesh import ROW_AXES
from hyper_parallel.step.batches import MicroBatch, StepBatch, filled_up
from hyper_parallel.step.pipeline_build import BuiltPipeline, Losses, check_processes, cut_into_stages
from hyper_parallel.step.pipeline_plan import StepShape
from hyper_parallel.step.program_runner import gradients_added, whole_loss
from hyper_parallel.step.train_step import accumulate
from hyper_parallel.strategy import Strategy


def pipeline(
    model: nn.Module,
    strategy: Strategy,
    *,
    rows: int,
    length: int,
    micro_batches: int,
    documents: bool = False,
    seed: int = 0,
    loss: LossConfig | None = None,
    device: torch.device | str | None = None,
) -> Pipeline:
    """Spread `model` as `strategy` declares, as `hp.parallelize` does, and cut it into the stages of its pipeline.

    Each rank keeps the parameters of its stages; the others go to the meta device. The model may have values, or be on
    the meta device: `init_weights` or `load_weights` then fill what this rank keeps. Without ``axes.pipeline`` there is
    one stage, and the same script runs.

    A step has `micro_batches` on each rank, of `rows` rows of `length` positions: the stages are cut by the time that
    these take. Batches of other shapes are planned when they come. `documents`: rows hold several, where
    `position_ids` begin anew. `seed`: of dropout. `loss`: as `train.loss` of a run file. `device`: where the steps
    run; left out, where the model's values are, or the CPU.

    A collective. Raises StrategyError for a pipeline that cannot be cut, or does not fit the ranks.
    """
    for name, value in (("rows", rows), ("length", length), ("micro_batches", micro_batches)):
        if value < 1:
            raise StrategyError(f"hp.pipeline: {name} must be at least 1; got {value}")
    loss = loss or LossConfig()
    shape = StepShape(rows, length, micro_batches, documents)
    losses = Losses(loss, LossConfig(chunk=loss.chunk), seed)
    return Pipeline(model, strategy, shape, device or device_of(model), losses)


def device_of(model: nn.Module) -> torch.device:
    """Where a model's values are; the CPU for one without values."""
    found = next((one.device for one in model.parameters() if not one.is_meta), None)
    return torch.device("cpu") if found is None else found


@dataclass(frozen=True)
class _Batch:
    """A rank's rows of a step or an evaluation, as all ranks know of them."""

    micro: list[MicroBatch]
    tokens: float
    """Valid tokens over all ranks."""
    documents: bool


class Pipeline:
    """A model cut into stages, and the passes over its micro-batches."""

    def __init__(
        self,
        model: nn.Module,
        strategy: Strategy,
        shape: StepShape,
        device: torch.device | str,
        losses: Losses,
    ) -> None:
        """As `pipeline`, with both losses."""
        self._built: BuiltPipeline | None = None
        """None for a model of one stage."""
        if strategy.axes.pipeline > 1:
            axes = strategy.axes
            check_processes(axes.world, f"the strategy's axes multiply to {axes.world} ({axes.product})")
            if strategy.memory.device is not None:
                raise StrategyError(
                    "memory.device keeps a pipeline's steps within a budget where the update is part of the step's "
                    "graph: call hp.step(model, strategy, ...), or leave it or the pipeline out"
                )
            self._built = cut_into_stages(model, strategy, shape, device, losses)
        else:
            parallelize(model, strategy)
        self.handle, self._shape, self._device = sharded(model), shape, torch.device(device)
        self._losses, self._documents = losses, shape.documents

    @property
    def plan(self) -> str:
        """The stages and the schedule of the first shape, in one line."""
        return "pipeline: one stage" if self._built is None else self._built.plan.described[0]

    def forward_backward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        *,
        step: int = 0,
        tokens: float | Tensor | None = None,
        row_numbers: Tensor | None = None,
        documents: bool | None = None,
    ) -> Tensor:
        """Run the forward and backward passes of a step; the step's loss, fp32 [], the same number on every rank.

        The arguments are this rank's rows of the step, int64 [B, S], in which B is a multiple of the micro-batch's
        `rows`; ranks that differ along `replicate` and `shard` alone have different rows. `labels` are shifted: the
        label at a position is the token after it, and -100 bears no loss. `position_ids`: left out, each row counts
        from 0.

        Afterwards ``parameter.grad`` of every parameter that this rank holds has the gradient of the whole step added
        to it, as by `backward()`; `hp.sharded(model).grad_norm()` and `clip` are over all stages.

        `tokens`: what the sum of losses is divided by; left out, the valid tokens of these rows on all ranks.
        Dropout is a function of `step`, its number, and of `row_numbers`, int64 [B], the rows' indices in the whole
        step; left out, ranks have contiguous rows. `documents`: whether rows hold several; left out, they do where
        positions begin anew.

        A collective. Raises DataError, on all ranks, for rows that no pipeline takes.
        """
        batch = self._batch(input_ids, labels, position_ids, row_numbers, documents, fill=False)
        divisor = torch.as_tensor(batch.tokens if tokens is None else tokens, device=self._device).float()
        mine = StepBatch(step, [], batch.micro, divisor)
        if self._built is None:
            part = accumulate(
                self.handle.model.train(),
                self.handle,
                mine,
                divisor,
                self._losses.seed,
                self._losses.training,
            )
        else:
            with gradients_added(self.handle):
                part = self._built.train(mine, divisor, batch.documents)
        return whole_loss(self.handle, part)

    def evaluate(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        *,
        tokens: float | Tensor | None = None,
        documents: bool | None = None,
    ) -> Tensor:
        """The mean loss of a valid token of these rows on all ranks, fp32 [], the same number on every rank.

        Arguments as of `forward_backward`, but for B, which may be any number; NaN where no token bears loss. A
        collective. Raises DataError.
        """
        batch = self._batch(input_ids, labels, position_ids, None, documents, fill=True)
        if self._built is None:
            part = self._eagerly_evaluated(batch)
        else:
            part = self._built.evaluate(batch.micro, batch.documents)
        whole = whole_loss(self.handle, part)
        return whole / torch.as_tensor(batch.tokens if tokens is None else tokens, device=whole.device)

    def _eagerly_evaluated(self, batch: _Batch) -> Tensor:
        model, total = self.handle.model, torch.zeros((), device=self._device)
        with inference(model), documents_known(batch.documents):
            for one in batch.micro:
                total += causal_lm_loss(
                    model, one.input_ids, one.labels, one.position_ids, 1.0, self._losses.evaluation
                )
        return total

    # Rows.

    def _batch(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None,
        row_numbers: Tensor | None,
        documents: bool | None,
        fill: bool,
    ) -> _Batch:
        """The micro-batches of this rank's rows. `fill`: with rows that bear no loss, up to whole micro-batches. A
        collective."""
        given = {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}
        problem = self._problem(given, fill)
        shape = (0, 0) if problem is not None else (input_ids.size(0), input_ids.size(1))
        several = bool(documents)
        if documents is None and problem is None and position_ids is not None:
            several = several_documents(position_ids)
        valid = 0 if problem is not None else int(valid_tokens(labels))
        tokens, several = agree_on_rows(
            self.handle,
            shape,
            f"{shape[0]} rows of {shape[1]} positions",
            self._device,
            several=several,
            valid=valid,
            problem=problem,
        )
        if not tokens and not fill:
            raise DataError("no token of the rows bears loss; check that labels are not all -100")
        if documents is None:
            # Rows of one document are right as rows of several too, and have one plan then.
            several = self._documents = self._documents or several
        rows = {name: one.to(self._device) for name, one in given.items() if one is not None}
        count, length = shape
        if position_ids is None:
            rows["position_ids"] = torch.arange(length, device=self._device).repeat(count, 1)
        if row_numbers is None:
            begin = self.handle.data_index * count
            row_numbers = torch.arange(begin, begin + count)
        rows["rows"] = row_numbers.to(self._device)
        each = self._shape.rows
        rows = filled_up(rows, -count % each)
        parts = ({name: one[at : at + each] for name, one in rows.items()} for at in range(0, count, each))
        micro = [
            MicroBatch(one["input_ids"], one["labels"], one["position_ids"], one["rows"], several=several)
            for one in parts
        ]
        return _Batch(micro, tokens, several)

    def _problem(self, given: dict[str, Tensor | None], fill: bool) -> str | None:
        """Why these rows cannot be computed, in words."""
        shapes = {name: tuple(one.shape) for name, one in given.items() if one is not None}
        shape = shapes["input_ids"]
        if len(shape) != 2 or 0 in shape or any(other != shape for other in shapes.values()):
            told = ", ".join(f"{name} {list(one)}" for name, one in shapes.items())
            return f"rows are tensors [B, S] of one shape; got {told}"
        try:
            check_length(self.handle.plan, shape[1])
        except StrategyError as error:
            return str(error)
        each, ranks = self._shape.rows, 1 if self._built is None else len(self._built.place.groups)
        if not fill and shape[0] % each:
            return (
                f"{shape[0]} rows are no whole number of micro-batches of {each} rows; give each rank a multiple of "
                f"{each} rows, or make hp.pipeline with other rows"
            )
        if not fill and shape[0] // each < ranks:
            return (
                f"{shape[0]} rows are {shape[0] // each} micro-batches of {each} rows, and a pipeline of {ranks} needs "
                f"at least {ranks}; give each rank at least {ranks * each} rows, or make hp.pipeline with fewer rows"
            )
        return None


def agree_on_rows(
    handle: ShardedModel,
    shape: tuple[int, int],
    described: str,
    device: torch.device,
    *,
    several: bool,
    valid: int,
    problem: str | None,
) -> tuple[float, bool]:
    """Valid tokens over all ranks, and whether any row holds several documents; one collective.

    `shape`: two numbers that every rank must have alike, which errors call `described`. `valid`: tokens of this rank's
    rows. Raises DataError on every rank where one has a problem, or another shape.
    """
    squares = [size * size for size in shape]
    mine = [
        int(problem is not None),
        int(several),
        valid * int(handle.speaks(ROW_AXES)),
        *shape,
        *squares,
    ]
    told = handle.over_all_ranks(torch.tensor(mine, dtype=torch.int64, device=device))
    problems, documents, tokens, *sizes = told.tolist()
    if problem is not None:
        raise DataError(problem)
    if problems:
        raise DataError("the rows of another rank cannot be computed; its own error says why")
    # Numbers are equal where n Σ x² = (Σ x)², and not otherwise.
    if any(handle.world * sizes[2 + at] != sizes[at] ** 2 for at in range(2)):
        raise DataError(
            f"this rank has {described}, and another one has other numbers; give every rank as many rows, padded to "
            "one length"
        )
    return float(tokens), bool(documents)
