"""One step of a pipeline with all ranks in this process, a thread each: collectives and transfers go through memory.

What runs is what workers run: the planned stages, their Programs and interpreters, reductions, the norm and the update.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from hyper_parallel.compat.thread_ranks import LIMIT_S, ThreadRanks
from hyper_parallel.config import RunConfig
from hyper_parallel.runtime.transfers import MemoryTransfers, memory_channels
from hyper_parallel.step.build import fill_model
from hyper_parallel.step.pipeline_build import build_pipeline
from hyper_parallel.verify.families import has_experts
from hyper_parallel.verify.pipeline_step import merged, run_pipeline_step
from hyper_parallel.verify.step import StepOutcome, Tensors


def pipeline_in_process(
    config: RunConfig, model: nn.Module, batch: Tensors, update_from: Tensors | None = None
) -> StepOutcome:
    """The step of a model on the meta device, on the rows `batch`; arguments as of `verify.step.run_step`.

    Raises what a run with this file would raise.
    """
    # The report shows errors parameter by parameter instead of a refusal.
    unchecked = config.strategy.model_copy(update={"check": False})
    config = config.model_copy(update={"strategy": unchecked})
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
