"""The cluster of a strategy: the link levels of its collectives, and the machine that a section is planned for."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist

from hyper_parallel.cluster import Cluster, misplaced
from hyper_parallel.cluster.presets import preset_of
from hyper_parallel.compat import backend, collectives
from hyper_parallel.errors import ConfigError, StrategyError
from hyper_parallel.strategy import Strategy

log = logging.getLogger(__name__)


def placed_on(strategy: Strategy) -> Cluster | None:
    """The cluster whose levels collectives run along; None where each collective is one flat call.

    Every rank calls it. Rank 0 logs a warning for each axis that spans more than the level it is placed on.

    Raises StrategyError when the nodes have different numbers of ranks and the file does not give a number.
    """
    placement = strategy.placement
    if not placement.given or not dist.is_initialized() or strategy.axes.world == 1:
        return None
    cluster = Cluster.of(strategy, None if placement.devices.node else _local_world())
    if dist.get_rank() == 0:
        for line in misplaced(strategy, cluster):
            log.warning("%s", line)
    return cluster if placement.collectives == "levels" else None


def _local_world() -> int | None:
    """Ranks on each node, from the launcher's environment; None where it is unset or ranks are simulated."""
    if dist.get_backend() == "fake":
        return None
    # 0 where it is unset, so that all ranks notice when only some have it.
    mine = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    group = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    given = torch.tensor([mine, -mine], device=collectives.device_type())
    most, least = collectives.all_reduce(given, group, "max").tolist()
    if most != -least:
        raise StrategyError(
            f"nodes have between {-least} and {most} ranks (LOCAL_WORLD_SIZE), which are no levels to place axes on; "
            "start as many on each node, or set strategy.placement.devices.node"
        )
    return mine or None


def planning_cluster(strategy: Strategy, section: Literal["overlap", "memory"], kind: str) -> Cluster | None:
    """The machine by which a section of the strategy is planned; None where nothing is known of the device.

    Raises ConfigError for a cluster that is not known or has no device.
    """
    name = getattr(strategy, section).cluster
    if name is not None:
        cluster = Cluster.named(name).for_workers(strategy.axes.world)
        if cluster.device is None:
            raise ConfigError(
                f"strategy.{section}.cluster: {name} describes no device, without which nothing can be simulated; "
                "give it a device, or leave it out"
            )
        return cluster
    known = preset_of(backend(kind).device_name())
    if known is None:
        return None
    found, node = Cluster.preset(known), strategy.placement.devices.node
    return replace(found, node=node) if node else found
