"""Machines of published runs: a preset with what a row states, and with what its framework's kernels and libraries are.

The constants are the planner's, and those that the row's source was held out of:

| | constant |
|---|---|
| a launch of the host | `launch`, less what recorded graphs take the place of, `grace` times as long on a Grace |
| launches of a product of experts | `routing`, less what is captured |
| collectives of tensor parallelism in parts beside products | `hidden_tensor`, where the framework does so |
| products on Hopper by kernels that the library chooses unasked | `first` |
| products of Blackwell Ultra to those of Blackwell | `ultra` |
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hyper_parallel.cluster import Cluster
from hyper_parallel.cluster.device import Device
from hyper_parallel.cluster.efficiency import ShapeTable
from hyper_parallel.planner.columns import ARCHITECTURES
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.layer import (
    FUSED_ROUTING,
    RECORDED,
    attention_quality,
    best_attention_share,
    on_grace,
)
from hyper_parallel.planner.table import Table


def machine(table: Table, known: Constants, preset: Cluster, devices: int) -> Cluster:
    """The machine of a row: the preset of its hardware, with what the row states of nodes, links, memory and clock.
    `known`: the constants."""
    device = preset.device
    assert device is not None
    memory = replace(
        device.memory, bytes=float(table.capacity[0]), read=float(table.hbm[0]), write=float(table.hbm[0])
    )
    clock = float(table.peak16[0]) / device.peak("bfloat16")
    rates = {"node": table.node_rate, "supernode": table.supernode_rate, "network": table.network_rate}
    links = {
        level: replace(link, bandwidth=float(rates[level][0])) if level in rates else link
        for level, link in preset.links.items()
    }
    launch = known.launch * (known.grace if on_grace(table)[0] else 1.0)
    # The kernel is the framework's and not the one that the preset was measured with.
    attention = (ShapeTable(best=float((best_attention_share(table) * attention_quality(table))[0])),)
    return replace(
        preset,
        name=f"{preset.name}x{devices}",
        ranks=devices,
        node=int(table.node[0]) if np.isfinite(table.node[0]) else preset.node,
        device=replace(
            device,
            memory=memory,
            matrix={name: rate * clock for name, rate in device.matrix.items()},
            efficiency=replace(device.efficiency, attention=attention, matmul=products(table, known, device)),
            host_launch=launch * (1 - RECORDED * float(table.graphs[0])),
            host_kernels={GROUPED: grouped_launches(table, known)},
            comm_hidden={"tensor_x": known.hidden_tensor * min(1.0, float(table.overlap_tensor[0]))},
        ),
        links=links,
    )


GROUPED = "grouped_mm"
"""The product of all experts of a rank in a trace; a routed layer's forward pass has two, its backward pass four."""
CAPTURED_ROUTING = 30.0
"""Launches of routing that a captured layer's forward pass has itself."""


def grouped_launches(table: Table, known: Constants) -> float:
    """What a product of experts costs the framework's host, in launches.

    The closed forms' `routing` is what a routed layer's forward pass costs beyond a plain layer's: products expert by
    expert, splits, permutations and waits for counts of rows. What of it is captured is left out.
    """
    routing = known.routing * (1 - FUSED_ROUTING * float(table.fused_routing[0]))
    return max(1.0, (routing - CAPTURED_ROUTING) / 2)


def products(table: Table, known: Constants, device: Device) -> tuple[ShapeTable, ...]:
    """The preset's shares of the peak, and what the planner's constants know beyond it.

    On Hopper they are less where the library chooses kernels unasked (`Constants.first`). Blackwell Ultra's preset has
    the products that were measured on a B200, which draws less power (`Constants.ultra`).
    """
    times = {"hopper": known.first ** (1 - float(table.tuned[0])), "blackwell-ultra": known.ultra}
    share = times.get(ARCHITECTURES[int(table.architecture[0])], 1.0)
    if share == 1.0:
        return device.efficiency.matmul
    return tuple(replace(shape, best=shape.best * share) for shape in device.efficiency.matmul)
