"""One step of a pipeline on real workers, as `verify.step` has it of one mesh: what this rank's stages come to."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from hyper_parallel.compat.local_tensor import agreed
from hyper_parallel.config import RunConfig
from hyper_parallel.shard import sharded
from hyper_parallel.shard.loss import valid_tokens
from hyper_parallel.shard.sharded_model import LOSS_AXES
from hyper_parallel.step.batches import MicroBatch, StepBatch, share_of
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.step.pipeline_build import BuiltPipeline
from hyper_parallel.verify.step import StepOutcome, Tensors, replace_gradient


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
    stages hold. Arguments as of `verify.step.run_step`. A collective."""
    handle = sharded(model)
    whole = {key: tensor.to(handle.device) for key, tensor in whole.items()}
    batch = pipeline_batch(model, config, whole)
    loss = pipeline.train(batch, valid_tokens(whole["labels"]).float())
    loss = handle.over_all_ranks(loss * handle.axes.speaks(LOSS_AXES, handle.rank))
    norm = handle.grad_norm()
    owned = handle.owned()
    # Copies: what is not sharded is the parameter's own memory, which the update goes on to change.
    gradients = {p.name: agreed(handle.gather(p.grad, p.layout)) for p in owned if p.grad is not None}
    for parameter in owned if update_from is not None else ():
        replace_gradient(handle, parameter, update_from or {})
    optimizer = build_optimizer(model, config.train.optimizer)
    if config.train.clip is not None:
        handle.clip(handle.grad_norm(), config.train.clip)
    optimizer.step(1.0)
    values = {p.name: agreed(handle.gather(p.local, p.layout)) for p in owned}
    layouts = {p.name: str(p.layout) for p in owned}
    return StepOutcome(float(loss), float(norm), gradients, values, layouts)


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
