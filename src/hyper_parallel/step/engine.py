"""Engine selection (graph or eager), by a trial capture before the model is parallelized."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from hyper_parallel.config import RunConfig
from hyper_parallel.errors import BudgetError, StrategyError
from hyper_parallel.overlap.collective_order import APART, DIGEST, order_digest
from hyper_parallel.report.wait_line import waiting
from hyper_parallel.shard import ShardedModel, parallelize, sharded
from hyper_parallel.shard.model_structure import without_values
from hyper_parallel.shard.plan import plan
from hyper_parallel.step.capture_train_step import BatchShape
from hyper_parallel.step.graph_cache import (
    ELSEWHERE,
    ELSEWHERE_UNCOMPILED,
    Graphs,
    eagerly,
    over_budget,
    uncompiled_because,
)
from hyper_parallel.step.graph_store import GraphStore
from hyper_parallel.step.memory_budget import Budget
from hyper_parallel.step.recipe import Recipe

log = logging.getLogger(__name__)


def try_graph(
    config: RunConfig,
    model: nn.Module,
    first_shape: Callable[[ShardedModel], BatchShape],
    device: torch.device | str,
    artifacts: Path | None = None,
) -> tuple[Graphs | None, ShardedModel | None]:
    """The graphs of a run's steps, None where some rank cannot capture the first; and the handle of the shadow, whose
    process groups the real model can use. A collective.

    `model`: as it is before any strategy; it is not changed. `first_shape`: of the first step, from the shadow's
    handle. `artifacts`: the folder of what is compiled for the graphs; None does not compile. Raises StrategyError;
    BudgetError where no plan keeps a step within the memory that it was given.
    """
    try:
        shadow = without_values(model)
    # A module of the user's may hold what cannot be copied.
    except Exception as error:
        why = f"the step cannot be captured: the model cannot be copied: {error}"
        if config.effective_strategy.memory.device is not None:
            raise BudgetError(over_budget(why)) from error
        log.warning("%s", eagerly(why))
        return None, None
    parallelize(shadow, config.effective_strategy, lowering="traceable")
    handle = sharded(shadow)
    check_length(handle, config)
    memory = config.effective_strategy.memory
    budget = None
    if memory.device is not None:
        budget = Budget(config.effective_strategy, device, str(Path(config.out).absolute()), handle.rank)
    train = config.train
    store = GraphStore(Path(config.data.cache).expanduser() / "graphs") if train.graph_cache else None
    graphs = Graphs(
        Recipe.of(config, shadow), device, artifacts, budget, whole=train.profile is not None, store=store
    )
    shape = first_shape(handle)
    try:
        if store is not None and not _all(handle, graphs.stored(shape), device):
            # A rank that reads its step makes process groups at once, and one that captures it as it goes.
            graphs.not_stored(shape)
        with waiting("capturing the step" + (" and planning its memory" if budget is not None else "")):
            refused = refuses(graphs, shape, device)
        if budget is not None:
            graphs.begin(shape, refused)
    except BaseException:
        if budget is not None:
            budget.close()
        raise
    if not refused:
        return graphs, handle
    log.warning("%s", eagerly(graphs.refused or ELSEWHERE))
    return None, handle


def refuses(graphs: Graphs, shape: BatchShape, device: torch.device | str) -> bool:
    """Whether some rank cannot capture a step of this shape, which is ready otherwise: on every rank in the same order,
    and compiled on all or none. A collective."""
    refused, uncompiled, apart = _tried(graphs, shape, device)
    if apart and not refused:
        log.warning("%s", APART)
        graphs.unscheduled()
        refused, uncompiled, _ = _tried(graphs, shape, device)
    if uncompiled:
        if graphs.uncompiled is None:
            log.warning("%s", uncompiled_because(ELSEWHERE_UNCOMPILED))
        graphs.as_captured()
    return refused


def _all(handle: ShardedModel, holds: bool, device: torch.device | str) -> bool:
    """Whether something holds on every rank. A collective."""
    missing = torch.tensor([float(not holds)], device=device)
    return not handle.all_reduce(missing, handle.mesh.names, "max").item()


def _tried(graphs: Graphs, shape: BatchShape, device: torch.device | str) -> tuple[bool, bool, bool]:
    """Whether some rank cannot capture a step of this shape; cannot compile it; and whether the ranks' collectives are
    in different orders. A collective."""
    ready = graphs.ready(shape)
    own = [0.0] * DIGEST
    if ready and graphs.orders_collectives:
        own = order_digest(graphs[shape].plain)
    told = torch.tensor(
        [float(not ready), float(graphs.uncompiled is not None), *own, *(-byte for byte in own)],
        device=device,
    )
    handle = graphs.shadow.handle
    refused, uncompiled, *orders = handle.all_reduce(told, handle.mesh.names, "max").tolist()
    apart = any(most != -least for most, least in zip(orders[:DIGEST], orders[DIGEST:], strict=True))
    return bool(refused), bool(uncompiled), apart


def check_length(handle: ShardedModel, config: RunConfig) -> None:
    """Raise StrategyError when rows of the run's length cannot be split as its strategy wants."""
    try:
        plan.check_length(handle.plan, config.data.sequence)
    except StrategyError as error:
        raise StrategyError(f"data.sequence: {error}") from None
