"""Pass pipeline: the rewrites of a captured step, in the order in which they run.

    recompute      layers computed again in the backward pass          only where the capture could not do it itself
    regather       gathered weights freed after the forward pass       strategy.memory.reshard_after_forward
    order          collectives beside computation                      strategy.overlap
    offload        peak memory under a budget                          strategy.memory.device

All but `offload` rewrite one micro-batch, whatever their number (`of_whole_step`).

`train`, `simulate`, `plan --refine`, `strategy: auto` and `hp.offload` take their passes from here, so that a predicted
step is the step that runs. The pipeline lies in this folder because offloading is its last and highest part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import BudgetError
from hyper_parallel.graph import Pass
from hyper_parallel.offloading.schedule.allowed_rewrites import Choices
from hyper_parallel.offloading.schedule.offload_pass import Offload
from hyper_parallel.offloading.schedule.problem import OffloadTier, Rate
from hyper_parallel.overlap.collective_order import order_pass
from hyper_parallel.shard.memory import recompute_pass, regather_pass
from hyper_parallel.strategy import Strategy
from hyper_parallel.strategy.memory import Memory
from hyper_parallel.units import format_bytes


def passes(
    strategy: Strategy,
    cluster: Cluster | None = None,
    device: torch.device | str = "cpu",
    *,
    ordered: bool = True,
    offload: Offload | None = None,
    recompute: Sequence[str] = (),
) -> tuple[Pass, ...]:
    """The passes of a step under a strategy.

    `cluster`: the described machine on which the step runs; None for the machine at hand, which has a `device` of this
    kind. `ordered`: whether collectives may leave the order of the model's code. `offload`: the budget's pass, with
    tiers as they were measured or as `described_offload` has them; None where there is no budget. `recompute`: modules
    whose forward pass the backward pass repeats; empty where checkpointing was captured. Raises ConfigError for a
    cluster that is unknown or describes no device.
    """
    found = [
        recompute_pass(strategy, recompute),
        regather_pass(strategy),
        order_pass(strategy, cluster, device) if ordered else None,
        offload,
    ]
    return tuple(one for one in found if one is not None)


def of_whole_step(one: Pass) -> bool:
    """Whether a pass plans over all micro-batches of a step; the others rewrite one, which stands for all."""
    return "offload" in one.provides


def described_offload(
    strategy: Strategy, cluster: Cluster, show: Callable[[str], None] | None = None
) -> Offload | None:
    """The budget's pass with the tiers of a described cluster; None where the strategy sets no budget.

    `show`: is given lines about its progress. Raises BudgetError for a tier that the cluster lacks, or that is smaller
    than what all ranks may use.
    """
    memory = strategy.memory
    if memory.device is None:
        return None
    spaces = spaces_of(memory, cluster, strategy.axes.world)
    return Offload(cluster, memory.device, spaces, Choices.of(memory), show=show)


_MANY = 1 << 40
"""Bytes of a large copy. A link's bandwidth is this size over the copy's time beyond its latency."""


def spaces_of(memory: Memory, cluster: Cluster, ranks: int) -> tuple[OffloadTier, ...]:
    """The tiers that the strategy names, the fastest first, as each of `ranks` ranks finds them when all copy at once.

    Raises BudgetError for a tier that the cluster does not describe, or that is smaller than what all ranks may use.
    """
    found = []
    given = {
        "host": (memory.host, cluster.host),
        "pool": (None if memory.pool is None else memory.pool // ranks, cluster.pool),
        "flash": (None if memory.flash is None else 0, cluster.flash),
    }
    for name, (asked, tier) in given.items():
        if asked is None:
            continue
        if tier is None:
            there = cluster.name or cluster.source
            raise BudgetError(
                f"strategy.memory.{name}: the cluster {there!r} describes no {name}; choose another cluster, or leave "
                f"{name} out"
            )
        share = int(tier.bytes / min(ranks, tier.ranks))
        if asked > share:
            raise BudgetError(
                f"strategy.memory.{name}: {format_bytes(asked)} for each rank, and the {min(ranks, tier.ranks)} that "
                f"share the {name} of cluster {cluster.name!r} have {format_bytes(share)} each; ask for less"
            )
        found.append(
            OffloadTier(
                name,
                asked or share,
                _rate(cluster, "device", name, ranks),
                _rate(cluster, name, "device", ranks),
            )
        )
    return tuple(found)


def _rate(cluster: Cluster, source: str, target: str, ranks: int) -> Rate:
    latency = cluster.copy_seconds(source, target, 0, ranks)
    return Rate(latency, _MANY / (cluster.copy_seconds(source, target, _MANY, ranks) - latency))
