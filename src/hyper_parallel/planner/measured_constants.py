"""Constants of a machine that was measured, in place of those that were fitted on published runs of accelerators.

`hyper-parallel calibrate` measures what a machine reaches by operator, shape and size (`cluster.efficiency`,
`cluster.measured`). The closed forms know fewer numbers; each is read off a table:

| Number | Read off |
|---|---|
| share of the peak, half sizes | the table of plain products, in the dtype of the run (`ShapeTable.best`, `half`) |
| attention | the table of causal attention, forward |
| bytes a second | the table of sums, at 4 MiB |
| bytes of a layer's operators | twice as many in float32 |
| links | α and β of gathers, scatters and sums among the most ranks; their geometric mean |
| launch | the device's |

A ring of n ranks takes (n − 1) α + (n − 1) / n · B / β (`cluster.collective_cost`), and the planner's `RankGroup` has
log₂(n) · hop + (n − 1) / n · B / rate; so hop = (n − 1) α / log₂(n) and rate = β.

Where workers share a machine's cores, a collective is computed by the cores that it would run beside: nothing of it is
taken to be hidden. What was not measured (waits of routed layers, an uneven load of experts) keeps its fitted value,
and what a process itself takes of memory is an estimate.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import geometric_mean

from hyper_parallel.cluster import MEASURED, Cluster, Device, Link
from hyper_parallel.cluster.collective_cost import form
from hyper_parallel.planner.constants import Constants, fitted
from hyper_parallel.planner.cost_model.layer import FUSED
from hyper_parallel.workload.work import Work
from hyper_parallel.workload.workload import Precision

SETTLED = float(1 << 22)
"""Bytes at which an operator's rate is read off."""
PROCESS = 5e8
"""Bytes that a process of PyTorch takes before it holds a tensor: an estimate."""
_NOTHING = 1e-6
"""A constant is positive."""

_KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def is_measured(cluster: Cluster) -> bool:
    """Whether a cluster's rates are measured, so that constants of published runs say nothing of it."""
    return cluster.name == MEASURED or bool(cluster.shared)


def read_off(cluster: Cluster, precision: Precision) -> tuple[Cluster, Constants]:
    """The cluster and the constants by which the closed forms price a measured cluster, with one worker on each rank.

    `cluster`: as `Cluster.for_workers` returns it."""
    device = cluster.device
    assert device is not None, "a measured cluster has a device"
    dtype, wide = ("float32", 4) if precision == "fp32" else ("bfloat16", 2)
    peak = device.peak(dtype)
    products = [table for table in device.efficiency.matmul if table.dtype == dtype] or list(
        device.efficiency.matmul
    )
    share, half = (products[0].best, products[0].half) if products else (1.0, (0.0, 0.0, 0.0))
    # `cost_model.kernels` scales the sizes with the rate; these are as measured.
    rows, columns, depth = (max(size / math.sqrt(peak * share / 250e12), _NOTHING) for size in half)
    rate, hop = _link(cluster)
    memory = replace(
        device.memory,
        bytes=device.memory.bytes / device.memory.ranks,
        read=_bandwidth(device, dtype),
        ranks=1,
    )
    seen = replace(
        cluster,
        device=replace(device, matrix={"bfloat16": peak, "float32": peak}, memory=memory),
        links={"node": Link("node", rate, 0.0)},
        node=None,
        supernode=None,
    )
    return seen, replace(
        fitted(),
        other=share,
        half_rows=rows,
        half_columns=columns,
        half_depth=depth,
        attention=_attention(device, dtype) / FUSED.get("other", 0.5),
        memory=1.0,
        # The closed forms count two bytes an element of a layer.
        elementwise=wide / 2,
        launch=max(device.launch, _NOTHING),
        inside=1.0,
        across=1.0,
        dispatch=1.0,
        crowding=_NOTHING,
        hop=hop,
        net_hop=hop,
        hidden_tensor=_NOTHING,
        hidden_expert=_NOTHING,
        hidden_data=_NOTHING,
        beside=1.0,
        straggling=_NOTHING,
        fixed=_NOTHING,
        outside=PROCESS,
    )


def _bandwidth(device: Device, dtype: str) -> float:
    """B/s of an operator that only moves bytes."""
    each = SETTLED / 3
    work = Work("elementwise", read=2 * each, written=each, dtype=dtype, op="aten.add.Tensor")
    return SETTLED / device.memory_seconds(work)


def _attention(device: Device, dtype: str) -> float:
    """The share of the peak that attention reaches."""
    tables = [table for table in device.efficiency.attention if table.dtype == dtype]
    causal = [table for table in tables if table.layout == "forward causal"] or tables
    return causal[0].best if causal else 0.5


def _link(cluster: Cluster) -> tuple[float, float]:
    """B/s of a rank's link, and seconds of a collective for each doubling of its ranks."""
    most = max((table.ranks for table in cluster.collectives), default=1)
    tables = [table for table in cluster.collectives if table.ranks == most and table.kind in _KINDS]
    if not tables or most < 2:
        return 1e12, _NOTHING
    hops = []
    for table in tables:
        waiting = form(table.kind)(most, 0.0, table.latency, 1.0)
        # The closed forms take a sum for two gathers.
        hops.append(max(waiting / (2 if table.kind == "all_reduce" else 1) / math.log2(most), _NOTHING))
    return geometric_mean(table.bandwidth for table in tables), geometric_mean(hops)
