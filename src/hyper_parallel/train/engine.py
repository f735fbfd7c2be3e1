"""Which engine runs a run's steps: tried on a shadow of the model, before the real one is parallelized."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import nn

from hyper_parallel.config import RunConfig
from hyper_parallel.data import TextData
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard import ShardedModel, parallelize, sharded
from hyper_parallel.train.batches import Batches
from hyper_parallel.train.graphs import (
    ELSEWHERE,
    ELSEWHERE_UNCOMPILED,
    Graphs,
    eagerly,
    shadow_of,
    uncompiled_because,
)
from hyper_parallel.train.recipe import Recipe
from hyper_parallel.train.whole_step import BatchShape

log = logging.getLogger(__name__)


def try_graph(
    config: RunConfig,
    model: nn.Module,
    text: TextData,
    device: torch.device | str,
    artifacts: Path | None = None,
) -> tuple[Graphs | None, ShardedModel | None]:
    """The graphs of a run's steps, None where some rank cannot capture the first; and the handle of the shadow, whose
    process groups the real model can use. A collective.

    `model`: as it is before any strategy; it is not changed. `artifacts`: the folder of what is compiled for the
    graphs; None does not compile. Raises StrategyError.
    """
    try:
        shadow = shadow_of(model)
    # A module of the user's may hold what cannot be copied.
    except Exception as error:
        log.warning("%s", eagerly(f"the step cannot be captured: the model cannot be copied: {error}"))
        return None, None
    parallelize(shadow, config.effective_strategy, lowering="traceable")
    handle = sharded(shadow)
    check_length(handle, config)
    graphs = Graphs(Recipe.of(config, shadow), device, artifacts)
    train = config.train
    batches = Batches(text.train, text.order, train.batch, train.micro_batch, handle, torch.device("cpu"))
    ready = graphs.ready(BatchShape.of(batches.load(0, 0).micro))
    told = torch.tensor([float(not ready), float(graphs.uncompiled is not None)], device=device)
    refused, uncompiled = handle.all_reduce(told, handle.mesh.names).tolist()
    if uncompiled:
        if graphs.uncompiled is None:
            log.warning("%s", uncompiled_because(ELSEWHERE_UNCOMPILED))
        graphs.as_captured()
    if not refused:
        return graphs, handle
    log.warning("%s", eagerly(graphs.refused or ELSEWHERE))
    return None, handle


def check_length(handle: ShardedModel, config: RunConfig) -> None:
    """Raise StrategyError when rows of the run's length cannot be split as its strategy wants."""
    try:
        handle.check_length(config.data.sequence)
    except StrategyError as error:
        raise StrategyError(f"data.sequence: {error}") from None
