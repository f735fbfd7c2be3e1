"""The cluster that a strategy's collectives run on, as its placement and the launcher say."""

from __future__ import annotations

import logging
import os

import torch
import torch.distributed as dist

from hyper_parallel.cluster import Cluster, misplaced
from hyper_parallel.compat import collectives
from hyper_parallel.errors import StrategyError
from hyper_parallel.strategy import Strategy

log = logging.getLogger(__name__)


def placed_on(strategy: Strategy) -> Cluster | None:
    """The levels that collectives run along; None where each is one flat call.

    Every rank calls it. Axes that do not lie as they are placed are told in rank 0's log.

    Raises StrategyError when the nodes have different numbers of ranks and the file does not say how many to count.
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
    """Ranks on each node, as launchers say it to their workers; nothing where ranks are only simulated."""
    if dist.get_backend() == "fake":
        return None
    # 0 where it is not said, so that all ranks find out together when some were told and others not.
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
