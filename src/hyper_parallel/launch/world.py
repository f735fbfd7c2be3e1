"""The number of workers of a run without a launcher."""

from __future__ import annotations

import os

from hyper_parallel.config.launch import LaunchConfig
from hyper_parallel.config.launched import Launched
from hyper_parallel.errors import ConfigError
from hyper_parallel.launch.launcher_env import WorkerPlace


def workers_of(config: Launched) -> int:
    """The number over all nodes: the product of the axes; if the planner chooses these, `launch.workers`, else one for
    each accelerator of this machine (or for each core without accelerators), times the number of nodes.

    Raises ConfigError if the given axes do not divide that number.
    """
    if not config.open:
        return config.effective_strategy.world
    if config.launch.workers is not None:
        return config.launch.workers
    here, what = devices_here(config.launch)
    world, fixed = here * config.launch.nodes, config.strategy.axes.world
    if world % fixed:
        raise ConfigError(
            f"the product of the given axes, {fixed}, does not divide the {world} {what}; set "
            "launch.workers to a multiple, or leave more axes open"
        )
    return world


def devices_here(launch: LaunchConfig) -> tuple[int, str]:
    """The number of this machine's devices for workers, and their kind."""
    if launch.device != "cpu":
        # Only here, because this needs torch.
        from hyper_parallel import compat

        for found in compat.accelerators():
            if launch.device in ("auto", found.name):
                return found.device_count(), f"{found.name} devices"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores, "cores"


def wrong_world(config: Launched, place: WorkerPlace) -> str | None:
    """The error line if a launcher started another number of workers than the strategy's axes need; else None."""
    world = place.world if config.open else config.effective_strategy.world
    if place.world == world:
        return None
    return (
        f"{place.launcher} started {place.world} workers, but the strategy's axes multiply to {world} "
        f"({config.effective_strategy.product}); start {world}, or change the axes"
    )
