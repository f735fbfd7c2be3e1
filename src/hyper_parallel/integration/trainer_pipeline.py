"""Pipelines inside a Trainer: the micro-batches of a step go through the stages together.

A Trainer calls `training_step` for each micro-batch of `gradient_accumulation_steps`. Here they are collected, padded
to one length, and the schedule runs at the last one. Where there are fewer than the pipeline has device groups, each is
cut into several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.config.train import LossConfig
from hyper_parallel.errors import IntegrationError
from hyper_parallel.integration.batch_rows import FewLengths, rows_of
from hyper_parallel.integration.parallel_run import check_world, world_size
from hyper_parallel.integration.streamed_sharding import as_on_rank_0, streamed
from hyper_parallel.shard.plan import make_plan
from hyper_parallel.shard.plan.plan import length_multiple
from hyper_parallel.step.batches import filled_up
from hyper_parallel.step.pipeline import Pipeline
from hyper_parallel.step.pipeline_build import Losses
from hyper_parallel.step.pipeline_plan import StepShape
from hyper_parallel.strategy import Strategy
from hyper_parallel.units import round_up

_LENGTH = 512
"""Positions that stages are cut for where the length of rows is not known."""


def check_pipeline_arguments(args: Any, *, metrics: bool, own_loss: bool, budget: bool) -> None:
    """Refuse what a Trainer cannot do over the stages of a pipeline. `metrics`: it computes metrics of logits;
    `own_loss`: its loss is not the next-token loss; `budget`: its activations are swapped, or kept within a budget.

    Raises IntegrationError for the first.
    """
    refused = {
        "compute_metrics": (
            metrics,
            "no rank has the logits; evaluate by the loss, or evaluate the saved model",
        ),
        "predict_with_generate": (
            getattr(args, "predict_with_generate", False),
            "the stages compute no text; generate with the saved model",
        ),
        "neftune_noise_alpha": (
            args.neftune_noise_alpha is not None,
            "the noise is no part of the captured step; leave it out",
        ),
        "a memory budget (memory.device, activation_mode 'swap')": (
            budget,
            "the stages are not kept within it yet; leave it out, or recompute layers (memory.recompute: layer)",
        ),
        "a loss that is not the model's own next-token loss": (
            own_loss,
            "the stages are cut from a causal language model and this loss; leave compute_loss_func out",
        ),
    }
    for name, (is_set, mend) in refused.items():
        if is_set:
            raise IntegrationError(
                f"{name} cannot be used with axes.pipeline: {mend}, or set axes.pipeline to 1"
            )


def rows_of_micro_batch(rows: int, accumulation: int, ranks: int) -> int:
    """Rows of a pipeline's micro-batch, which divide the Trainer's `rows`: all of them where the steps of accumulation
    are as many as the pipeline's device groups; else few enough for four micro-batches on each, if there are as many.

    Raises IntegrationError where there are too few rows for one micro-batch on each.
    """
    if accumulation >= ranks:
        return rows
    if accumulation * rows < ranks:
        raise IntegrationError(
            f"per_device_train_batch_size {rows} × gradient_accumulation_steps {accumulation} are "
            f"{accumulation * rows} micro-batches of a row, and a pipeline of {ranks} needs at least {ranks}; make one "
            "of them larger, or axes.pipeline smaller"
        )
    least = min(accumulation * rows, 4 * ranks)
    return max(n for n in range(1, rows + 1) if rows % n == 0 and accumulation * rows // n >= least)


@dataclass(frozen=True)
class _Taken:
    """A micro-batch of the Trainer's."""

    inputs: Mapping[str, Any]
    numbers: Tensor
    """int64 [B]: the rows' indices in the step."""


class TrainerPipeline:
    """The pipeline of a Trainer's model."""

    def __init__(self, pipeline: Pipeline, shape: StepShape, pad: int) -> None:
        """`shape`: for which the stages were cut; `pad`: the token of padding."""
        self._pipeline, self._each, self._count, self._pad = pipeline, shape.rows, shape.count, pad
        self.handle = pipeline.handle
        self._lengths = FewLengths(self.handle, [shape.length])
        self._taken: list[_Taken] = []

    @classmethod
    def over(
        cls,
        model: nn.Module,
        strategy: Strategy,
        args: Any,
        *,
        length: int,
        pad: int,
    ) -> TrainerPipeline:
        """Spread `model` in place over the stages, with rank 0's values. `length`: of the longest row, 0 where it is
        not known. A collective. Raises IntegrationError or StrategyError for a pipeline that does not fit."""
        check_world(strategy, world_size())
        accumulation, ranks = args.gradient_accumulation_steps, strategy.axes.pipeline
        rows = rows_of_micro_batch(args.per_device_train_batch_size, accumulation, ranks)
        count = accumulation * args.per_device_train_batch_size // rows
        multiple = length_multiple(make_plan(model, strategy.of_stage))
        positions = round_up(length or _LENGTH, multiple)
        as_on_rank_0(model)
        loss = LossConfig(label_smoothing=args.label_smoothing_factor)

        shape = StepShape(rows, positions, count, documents=False)

        def cut() -> Pipeline:
            return Pipeline(model, strategy, shape, args.device, Losses(loss, loss, args.seed))

        there = all(one.device == args.device for one in model.parameters())
        pipeline = cut() if there else streamed(model, cut, args.device)
        return cls(pipeline, shape, pad)

    def micro_batch(
        self,
        inputs: Mapping[str, Any],
        numbers: Tensor | None,
        step: int,
        tokens: Tensor | int | None,
        last: bool,
    ) -> Tensor:
        """Collect a micro-batch, and run the passes of all with the `last` one: the loss of the step then, the same on
        every rank, and 0 before.

        `numbers`: int64 [B], the rows' indices in the step; `tokens`: valid ones of the step over all ranks, None where
        the inputs have no next-token loss. A collective.
        """
        if numbers is None or tokens is None:
            raise IntegrationError(
                "axes.pipeline: the batch has no input_ids with labels, from which the stages compute the next-token "
                "loss; give both, or set axes.pipeline to 1"
            )
        self._taken.append(_Taken(inputs, numbers))
        if not last:
            return torch.zeros((), device=numbers.device)
        taken, self._taken = self._taken, []
        rows, several = self._rows(taken)
        rows = self._filled(rows, self._missing(rows["labels"].size(0)))
        return self._pipeline.forward_backward(**rows, step=step, tokens=tokens, documents=several)

    def evaluate(self, inputs: Mapping[str, Any], labels: Tensor, tokens: Tensor) -> Tensor:
        """The loss of held-out rows divided by `tokens`, the same on every rank. `labels`: int64 [B, S] as the inputs
        have them once they are shifted, or fewer. A collective."""
        known = {"shift_labels": labels}
        numbers = torch.arange(labels.size(0), device=labels.device)
        rows, several = self._rows([_Taken({**inputs, **known}, numbers)])
        del rows["row_numbers"]
        return self._pipeline.evaluate(**rows, tokens=tokens, documents=several)

    def _rows(self, taken: Sequence[_Taken]) -> tuple[dict[str, Tensor], bool]:
        """All rows as arguments of the pipeline, each micro-batch filled up to whole ones of the pipeline; and whether
        some may hold several documents."""
        length = self._lengths.length(max(one.inputs["input_ids"].size(1) for one in taken))
        found, several = [], False
        for one in taken:
            rows = rows_of(one.inputs, self.handle, self._pad, length=length)
            if rows.rest:
                raise IntegrationError(not_taken(rows.rest))
            assert rows.labels is not None, "the loss needs labels"
            positions = rows.position_ids
            if positions is None:
                positions = torch.arange(length, device=rows.labels.device).expand_as(rows.labels)
            columns = {
                "input_ids": rows.input_ids,
                "labels": rows.labels,
                "position_ids": positions,
                "row_numbers": one.numbers,
            }
            found.append(self._filled(columns, -rows.labels.size(0) % self._each))
            several = several or rows.several
        return {name: torch.cat([columns[name] for columns in found]) for name in found[0]}, several

    def _missing(self, count: int) -> int:
        """How many rows the last step of an epoch has fewer than the schedule takes. Where rows that fill it up would
        count, it runs with fewer micro-batches as long as there is one for each stage."""
        place = self.handle.pipeline
        assert place is not None, "the model is cut into stages"
        needed = len(place.groups) if self._balances else self._count
        return max(0, needed * self._each - count)

    @property
    def _balances(self) -> bool:
        """Whether the routers' auxiliary loss counts every row."""
        return self.handle.balancing is not None

    def _filled(self, columns: dict[str, Tensor], missing: int) -> dict[str, Tensor]:
        """The rows, and copies of the first one that bear no loss."""
        if not missing:
            return columns
        if self._balances and self.handle.model.training:
            raise IntegrationError(
                "the last batch of an epoch has fewer rows than the pipeline's micro-batches take, and rows that fill "
                "it up would count in the routers' auxiliary loss; set dataloader_drop_last=True"
            )
        return filled_up(columns, missing)


def not_taken(rest: Mapping[str, Any]) -> str:
    """Why the stages of a pipeline cannot be given these inputs beside tokens and positions, in words."""
    if "attention_mask" in rest:
        return (
            "the attention mask hides positions that are not at the ends of rows (padding on the left?), which the "
            "stages of a pipeline do not see; set tokenizer.padding_side = 'right'"
        )
    return (
        f"{', '.join(sorted(rest))} in the batch cannot be given to the stages of a pipeline, which take tokens, "
        "positions and labels; leave them out, or set axes.pipeline to 1"
    )
