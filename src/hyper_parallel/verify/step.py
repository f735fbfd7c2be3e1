"""One training step that returns whole gradients and updated values by parameter name.

The same code runs on one device, on simulated ranks and on real workers; of a pipeline on workers, or on threads of
this process that exchange through memory.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hyper_parallel.compat.local_tensor import agreed, each_rank, on_rank, one_device, per_rank
from hyper_parallel.compat.thread_ranks import LIMIT_S, ThreadRanks
from hyper_parallel.config import RunConfig
from hyper_parallel.data import MultimodalData, TrainingData
from hyper_parallel.errors import ConfigError
from hyper_parallel.runtime.rank_transfers import MemoryTransfers, memory_channels
from hyper_parallel.shard import ShardedModel, sharded
from hyper_parallel.shard.loss import causal_lm_loss, valid_tokens
from hyper_parallel.shard.process_mesh import LOSS_AXES
from hyper_parallel.step.batches import MicroBatch, StepBatch, share_of
from hyper_parallel.step.build import fill_model
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.step.pipeline_build import BuiltPipeline, build_pipeline

Tensors = dict[str, torch.Tensor]
EXPERT_COUNTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
"""Config keys for the number of experts in a layer."""


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of one step. Tensors are whole, on the CPU."""

    loss: float
    grad_norm: float
    gradients: Tensors
    """Gradients before clipping. Parameters without a gradient are left out."""
    values: Tensors
    """Values after clipping and the optimizer's update."""
    layouts: dict[str, str]


def has_experts(model: object) -> bool:
    """Whether a Transformers config describes mixture-of-experts layers."""
    return any(getattr(model, key, None) for key in EXPERT_COUNTS)


def rows_to_verify(config: RunConfig, text: TrainingData) -> Tensors:
    """The first `train.batch` rows of the run's data order: int64 [B, S]. Raises ConfigError for other than text."""
    if isinstance(text, MultimodalData):
        raise ConfigError(
            "'verify' compares steps on rows of text, and data.train has images or sound; give it text"
        )
    return text.train.batch(text.order.rows(0, config.train.batch))


def run_step(
    model: nn.Module,
    config: RunConfig,
    whole: Tensors,
    update_from: Tensors | None = None,
    *,
    data: int = 1,
) -> StepOutcome:
    """Run one step of a parallelized model that has values, on the rows `whole`.

    `update_from`: whole gradients for the update, in place of the model's own. Where a gradient is tiny, the first step
    of Adam is its sign, which depends on rounding; with the same gradients on both sides any difference of updates is a
    defect. `data`: the number of data ranks of the strategy under test that each data rank here stands for; their
    micro-batches of one index are computed as one.
    """
    handle = sharded(model)
    with one_device():
        device = next(iter(each_rank(handle.parameters()[0].local).values())).device
        whole = {key: tensor.to(device) for key, tensor in whole.items()}
    rows = whole["input_ids"].size(0)
    with one_device():
        tokens = float(valid_tokens(whole["labels"]))
    share = rows // (handle.strategy.axes.data * data)
    count = config.train.micro_batch or share
    loss = torch.zeros((), device=device)
    for micro in range(share // count):
        loss = loss + _micro_batch(model, handle, config, whole, tokens, micro, count, data)
    loss = handle.all_reduce(loss, LOSS_AXES)
    return _updated(model, config, loss, update_from)


def _updated(
    model: nn.Module, config: RunConfig, loss: torch.Tensor, update_from: Tensors | None
) -> StepOutcome:
    """The outcome of the rest of a step, once gradients are accumulated: their norm, clipping and the update."""
    handle = sharded(model)
    norm, parameters = handle.grad_norm(), handle.owned()
    # Copies: what is not sharded is the parameter's own memory, which the update goes on to change.
    gradients = {p.name: agreed(handle.gather(p.grad, p.layout)) for p in parameters if p.grad is not None}
    for p in parameters:
        if p.grad is not None and update_from is not None and p.name in update_from:
            p.grad.copy_(handle.cut(update_from[p.name], p.layout))
    optimizer = build_optimizer(model, config.train.optimizer)
    if config.train.clip is not None:
        handle.clip(handle.grad_norm(), config.train.clip)
    optimizer.step(1.0)
    values = {p.name: agreed(handle.gather(p.local, p.layout)) for p in parameters}
    layouts = {p.name: str(p.layout) for p in parameters}
    return StepOutcome(float(on_rank(loss, 0)), float(on_rank(norm, 0)), gradients, values, layouts)


def _micro_batch(
    model: nn.Module,
    handle: ShardedModel,
    config: RunConfig,
    whole: Tensors,
    tokens: float,
    micro: int,
    count: int,
    data: int,
) -> torch.Tensor:
    share = whole["input_ids"].size(0) // (handle.strategy.axes.data * data)

    def rows(rank: int) -> torch.Tensor:
        first = handle.data_index_of(rank) * data
        starts = [index * share + micro * count for index in range(first, first + data)]
        return torch.cat([torch.arange(start, start + count) for start in starts])

    def of_rank(x: torch.Tensor) -> torch.Tensor:
        return per_rank(lambda rank: x[rows(rank)])

    mine = {key: of_rank(x) for key, x in whole.items()}
    last = (micro + 1) * count == share
    with handle.micro_batch(seed=config.seed, step=0, rows=per_rank(rows), last=last):
        loss = causal_lm_loss(
            model,
            labels=mine.pop("labels"),
            tokens=tokens,
            options=config.train.loss,
            micro_batches=share // count,
            **inputs_of(mine),
        )
        loss.backward()
    return loss.detach()


def inputs_of(rows: Tensors) -> Tensors:
    """The model's keyword arguments from tensors whose first dim is rows.

    A vision-language model takes its patches [patches, ...] of all images one after the other, and positions of
    three kinds as [3, B, S].
    """
    inputs = dict(rows)
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].flatten(0, 1)
    if inputs["position_ids"].dim() == 3:
        inputs["position_ids"] = inputs["position_ids"].transpose(0, 1)
    return inputs


def pipeline_batch(model: nn.Module, config: RunConfig, whole: Tensors) -> StepBatch:
    """This rank's share of the rows `whole`, int64 [B, S] tensors, in micro-batches."""
    rows = whole["input_ids"].size(0)
    share = share_of(sharded(model), rows)
    places = [range(at, at + config.micro_batch) for at in range(share.start, share.stop, config.micro_batch)]
    micro = [
        MicroBatch(
            whole["input_ids"][at.start : at.stop],
            whole["labels"][at.start : at.stop],
            whole["position_ids"][at.start : at.stop],
            torch.arange(at.start, at.stop, device=whole["input_ids"].device),
            several=True,
        )
        for at in places
    ]
    tokens = torch.stack([valid_tokens(one.labels) for one in micro]).sum().float()
    return StepBatch(0, list(range(rows)), micro, tokens)


def run_pipeline_step(
    model: nn.Module,
    pipeline: BuiltPipeline,
    config: RunConfig,
    whole: Tensors,
    update_from: Tensors | None = None,
) -> StepOutcome:
    """One step of a model with values on the rows `whole`; gradients and values of the parameters that this rank's
    stages hold. Arguments as of `run_step`. A collective."""
    handle = sharded(model)
    whole = {key: tensor.to(handle.device) for key, tensor in whole.items()}
    batch = pipeline_batch(model, config, whole)
    loss = pipeline.train(batch, valid_tokens(whole["labels"]).float())
    loss = handle.over_all_ranks(loss * handle.axes.speaks(LOSS_AXES, handle.rank))
    return _updated(model, config, loss, update_from)


def merged(outcomes: Iterable[StepOutcome]) -> StepOutcome:
    """The outcome of the whole model from those of its ranks: NaN where ranks that hold the same differ."""
    first, *rest = outcomes
    gradients, values = dict(first.gradients), dict(first.values)
    layouts = dict(first.layouts)
    loss, norm = first.loss, first.grad_norm
    for one in rest:
        for whole, part in ((gradients, one.gradients), (values, one.values)):
            for name, tensor in part.items():
                if not torch.equal(whole.setdefault(name, tensor), tensor):
                    whole[name] = torch.full_like(tensor, torch.nan)
        layouts |= one.layouts
        loss = loss if loss == one.loss else math.nan
        norm = norm if norm == one.grad_norm else math.nan
    return StepOutcome(loss, norm, gradients, values, layouts)


# One step of a pipeline with all ranks in this process, a thread each: collectives and transfers go through memory.
#
# What runs is what workers run: the planned stages, their Programs and interpreters, reductions, the norm and the
# update.


def unchecked(config: RunConfig) -> RunConfig:
    """The run without the check of gradients: the report shows errors by parameter instead of a refusal."""
    return config.model_copy(update={"strategy": config.strategy.model_copy(update={"check": False})})


def pipeline_in_process(
    config: RunConfig, model: nn.Module, batch: Tensors, update_from: Tensors | None = None
) -> StepOutcome:
    """The step of a model on the meta device, on the rows `batch`; arguments as of `run_step`.

    Raises what a run with this file would raise.
    """
    config = unchecked(config)
    world = config.strategy.axes.world
    ranks, channels = ThreadRanks(world), memory_channels(world)
    built = []
    for rank in range(world):
        with ranks.preparing(rank):
            own: Any = copy.deepcopy(model).train()
            if has_experts(getattr(own, "config", None)):
                # One by one, which the reference computes, they cannot be captured.
                own.set_experts_implementation("grouped_mm")
            pipeline = build_pipeline(
                config, own, True, "cpu", lambda here: MemoryTransfers(here, channels, LIMIT_S)
            )
            fill_model(own, config, "cpu")
            built.append((own, pipeline))

    def step(rank: int) -> StepOutcome:
        own, pipeline = built[rank]
        return run_pipeline_step(own, pipeline, config, batch, update_from)

    return merged(ranks.run(step))
