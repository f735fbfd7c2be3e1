"""The machine that a run is planned for: named in the file, the device's preset, or this one, measured once.

What is measured is kept beside other caches of the user (`$XDG_CACHE_HOME/hyper-parallel/clusters`, else under
`~/.cache`), by host, cores, PyTorch, number of workers and `FORM`; who deletes the file has it measured again.
"""

from __future__ import annotations

import math
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean

import torch

from hyper_parallel.calibrate import Settings, calibrate
from hyper_parallel.cluster import MEASURED, Cluster, Device, Link, Tier
from hyper_parallel.cluster.collective_cost import form
from hyper_parallel.cluster.presets import preset_of
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import ConfigError, HyperParallelError
from hyper_parallel.launch import Worker
from hyper_parallel.planner.constants import Constants, fitted
from hyper_parallel.planner.cost_model.layer import FUSED
from hyper_parallel.planner.cost_model.memory import HOST_PART
from hyper_parallel.proc import cores
from hyper_parallel.strategy.memory import Memory
from hyper_parallel.workload.work import Work
from hyper_parallel.workload.workload import Precision

Say = Callable[[str], None]

FORM = 2
"""Counts up when what is measured, or how collectives run, is not what it was: older measurements are made anew."""


def machine_of(config: RunConfig, worker: Worker, say: Say) -> Cluster:
    """The cluster that a run's workers are on, as each of them sees it. `say` is called with what takes time.

    Raises ConfigError for a cluster that is not known, has no device, or is too small, and for a device of which
    nothing is known.
    """
    name = config.strategy.cluster
    if name is not None:
        return named(name, worker.world, "strategy.cluster")
    known = preset_of(worker.backend.device_name())
    if known is not None:
        return replace(Cluster.preset(known), node=worker.local_world, ranks=worker.world)
    if worker.backend.name != "cpu":
        raise ConfigError(
            f"strategy: auto needs to know the machine, and there is no preset for {worker.backend.device_name()}; "
            "measure it with hyper-parallel calibrate and set strategy.cluster to the file, or write the axes"
        )
    if worker.world != worker.local_world:
        raise ConfigError(
            "strategy: auto measures one machine, and these workers are on several whose links are not known; "
            "describe them in a cluster file and set strategy.cluster to it, or write the axes"
        )
    return measured(worker.world, say)


def named(name: str, world: int, key: str) -> Cluster:
    """A preset or a file for `world` workers; `key` is the key that names it.

    Raises ConfigError for one that is not known, too small, or says nothing of its devices.
    """
    found = Cluster.named(name)
    if found.ranks is not None and not found.shared and found.ranks < world:
        raise ConfigError(f"{key}: {name} has {found.ranks} devices, and there are {world} workers")
    seen = found.for_workers(world)
    if seen.device is None or (world > 1 and not seen.links and not seen.collectives):
        lacks = "device" if seen.device is None else "link between devices"
        raise ConfigError(f"{key}: {name} describes no {lacks}, without which nothing can be planned")
    return replace(seen, name=seen.name or name, ranks=world)


def measured(world: int, say: Say, measure: Callable[[Settings, Say], Cluster] = calibrate) -> Cluster:
    """This machine for `world` workers: as it was measured before, else measured now."""
    file = _file(world)
    if file.is_file():
        try:
            found = Cluster.load(file)
        except HyperParallelError:
            say(f"{file} cannot be read and is measured again")
        else:
            say(f"this machine as measured before ({file}; delete it to measure again)")
            return replace(found.for_workers(world), ranks=world)
    say(f"measuring this machine for {world} workers, once: about a minute")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(
            Settings(workers=world, level="quick", device="cpu", folder=Path(folder)), lambda _: None
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        found.dump(file)
        kept = f"kept in {file}"
    except OSError as error:
        kept = f"not kept: {file}: {error.strerror}"
    say(f"measured in {time.monotonic() - begun:.0f} s; {kept}")
    return replace(found.for_workers(world), ranks=world)


def _file(world: int) -> Path:
    """The file of the measurement for `world` workers."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    key = f"{platform.node()}-{cores()}-cores-torch-{torch.__version__}-{world}-workers-{FORM}"
    return cache / "hyper-parallel" / "clusters" / f"{re.sub(r'[^A-Za-z0-9.+-]', '_', key)}.yaml"


# Constants of a machine that was measured, in place of those that were fitted on published runs of accelerators.
#
# `hyper-parallel calibrate` measures what a machine reaches by operator, shape and size (`cluster.efficiency`,
# `cluster.device`). The closed forms know fewer numbers; each is read off a table:
#
# | Number | Read off |
# |---|---|
# | share of the peak, half sizes | the table of plain products, in the dtype of the run (`ShapeTable.best`, `half`) |
# | attention | the table of causal attention, forward |
# | bytes a second | the table of sums, at 4 MiB |
# | bytes of a layer's operators | twice as many in float32 |
# | links | α and β of gathers, scatters and sums among the most ranks; their geometric mean |
# | launch | the device's |
#
# A ring of n ranks takes (n − 1) α + (n − 1) / n · B / β (`cluster.collective_cost`), and the planner's `RankGroup` has
# log₂(n) · hop + (n − 1) / n · B / rate; so hop = (n − 1) α / log₂(n) and rate = β.
#
# Where workers share a machine's cores, a collective is computed by the cores that it would run beside: nothing of it
# is taken to be hidden. What was not measured (waits of routed layers, an uneven load of experts) keeps its fitted
# value, and what a process itself takes of memory is an estimate.

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
    each = SETTLED / 3
    sum_of_two = Work("elementwise", read=2 * each, written=each, dtype=dtype, op="aten.add.Tensor")
    memory = replace(
        device.memory,
        bytes=device.memory.bytes / device.memory.ranks,
        read=SETTLED / device.memory_seconds(sum_of_two),
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
        issue=_NOTHING,
        # The closed forms count two bytes an element of a layer.
        elementwise=wide / 2,
        launch=max(device.launch, _NOTHING),
        inside=1.0,
        across=1.0,
        scattered=1.0,
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


# The machine as a run with a memory budget sees it: the budget's bytes in each tier.
#
# A budget counts live bytes of the step, so that neither an allocator's loss nor a driver's buffers come on top of it:
# the device's memory is set to what leaves the budget after both (`cost_model.memory.fits`). The tiers that the budget
# names count as one, at the rate of the slowest that is needed; flash, which has no size, counts as all of its disk.

_COPY = 1 << 26
"""Bytes of the copy by which a tier's rate is read off."""
_FLASH = 1e15
"""Bytes of a disk that nobody described."""
_RATE = 1e9
"""B/s of a tier that nobody described: an estimate, as of a plain disk."""


def budgeted(memory: Memory, cluster: Cluster, world: int, constants: Constants) -> Cluster:
    """The cluster whose device holds the budget, and whose host holds what the budget's tiers do, for each rank."""
    assert memory.device is not None, "a budget"
    assert cluster.device is not None, "a described device"
    there = cluster.device.memory
    device = min(there.bytes / there.ranks, memory.device * constants.slack + constants.outside)
    bytes, rate = 0.0, float("inf")
    for name, given in (("host", memory.host), ("pool", memory.pool and memory.pool / world)):
        if given:
            bytes, rate = bytes + given, min(rate, _rate(cluster, name, world))
    if memory.flash is not None:
        bytes += cluster.flash.bytes / min(world, cluster.flash.ranks) if cluster.flash else _FLASH
        rate = min(rate, _rate(cluster, "flash", world))
    return replace(
        cluster,
        device=replace(cluster.device, memory=replace(there, bytes=device, ranks=1)),
        host=Tier("host", bytes / HOST_PART, 2 * rate, 2 * rate),
        pool=None,
        links={**cluster.links, "host": Link("host", rate, 0.0)},
    )


def _rate(cluster: Cluster, tier: str, ranks: int) -> float:
    """B/s between a device and a tier, with all ranks copying at once."""
    try:
        ways = [cluster.copy_seconds(*way, _COPY, ranks) for way in (("device", tier), (tier, "device"))]
    except ConfigError:
        return _RATE
    return _COPY / max(ways)
