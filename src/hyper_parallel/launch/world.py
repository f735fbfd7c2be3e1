"""How many workers a run has that no launcher has started."""

from __future__ import annotations

import os

from hyper_parallel.config import RunConfig
from hyper_parallel.errors import ConfigError


def workers_of(config: RunConfig) -> int:
    """Over all nodes: what the axes multiply to; where the planner chooses these, `launch.workers`, else a worker for
    each accelerator of this machine, or for each core where there is none, on as many nodes as the run has.

    Raises ConfigError where the axes that are written do not divide that.
    """
    if not config.open:
        return config.effective_strategy.axes.world
    if config.launch.workers is not None:
        return config.launch.workers
    here, what = _devices(config)
    world, fixed = here * config.launch.nodes, config.strategy.axes.world
    if world % fixed:
        raise ConfigError(
            f"the axes that are written multiply to {fixed}, which does not divide the {world} {what}; set "
            "launch.workers to a multiple, or leave more axes open"
        )
    return world


def _devices(config: RunConfig) -> tuple[int, str]:
    """How many devices this machine has for workers, and what they are called."""
    if config.launch.device != "cpu":
        # Only here, because this needs torch.
        from hyper_parallel import compat

        for found in compat.accelerators():
            if config.launch.device in ("auto", found.name):
                return found.device_count(), f"{found.name} devices"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores, "cores"
