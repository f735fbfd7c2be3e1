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

from collections.abc import Sequence

import torch

from hyper_parallel.cluster import Cluster
from hyper_parallel.graph import Pass
from hyper_parallel.offloading.schedule.allowed_rewrites import Choices
from hyper_parallel.offloading.schedule.offload_pass import Offload
from hyper_parallel.offloading.schedule.tier_capacities import spaces_of
from hyper_parallel.overlap.collective_order import order_pass
from hyper_parallel.shard.graph_passes import recompute_pass, regather_pass
from hyper_parallel.strategy import Strategy


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


def described_offload(strategy: Strategy, cluster: Cluster) -> Offload | None:
    """The budget's pass with the tiers of a described cluster; None where the strategy sets no budget.

    Raises BudgetError for a tier that the cluster lacks, or that is smaller than what all ranks may use.
    """
    memory = strategy.memory
    if memory.device is None:
        return None
    spaces = spaces_of(memory, cluster, strategy.axes.world)
    return Offload(cluster, memory.device, spaces, Choices.of(memory))
