"""Table of configurations, one row each, with a column for each field.

Every column is a float64 array of [n], or of [1] where one value holds for all rows, so that a formula is plain
arithmetic on columns and costs the same for a published run as for the millionth strategy of a search. A choice among
names is a code: the index into the tuple of names beside it (`PRECISIONS`, `RECOMPUTE`, …).

    devices = replicate · shard · context · tensor_x · tensor_y · pipeline          `expert` folds over the inner ones
    batch   = replicate · shard · micro · micro-batches of a step
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import ConfigError
from hyper_parallel.planner.columns import (
    ARCHITECTURES,
    WORKLOAD_COLUMNS,
    Array,
    Profile,
    architecture,
    of_workload,
)
from hyper_parallel.workload.workload import ADAMW, PRECISIONS, Workload, state_bytes

__all__ = [
    "COLUMNS",
    "DEGREES",
    "PRECISIONS",
    "PROFILE_COLUMNS",
    "SPREAD",
    "Array",
    "Table",
    "of_cluster",
    "of_profile",
    "of_workload",
]


class Table:
    """Configurations as columns, each an attribute. Raises ValueError where columns differ in length.

    The columns of what is trained are named in `columns` (`SHAPE`, `LATENT`, `MIXER`, `ADAPTER`, `STEP`), those of what
    a framework does in `Profile`; the others are these.
    """

    devices: Array
    node: Array
    """Devices in a node; inf where all are in one."""
    supernode: Array
    """Devices in a supernode; 1 where there is none."""
    peak16: Array
    """Dense FLOP/s of matrix products in bfloat16, as the maker states it."""
    peak8: Array
    """In 8 bits; the 16-bit rate where the device has none."""
    peak4: Array
    """In 4 bits; the 8-bit rate where the device has none."""
    capacity: Array
    """Bytes of a device's memory."""
    hbm: Array
    """B/s of a device's memory."""
    issue_rate: Array
    """Instructions/s of everything but matrix products, each for one element."""
    node_rate: Array
    """B/s of a device within the node, one way, as the maker states it."""
    supernode_rate: Array
    """B/s of a device within the supernode, one way; the network's where there is no supernode."""
    network_rate: Array
    """B/s of a device on the network, one way."""
    shared_paths: Array
    """1: nodes' traffic shares the network's switches by hashing, so that more nodes crowd it (`Link.shared_paths`)."""
    host_rate: Array
    """B/s between a device and its host's memory, each way while both are used; 0 where the cluster describes none."""
    host_bytes: Array
    """A device's part of the memory of its host and of a pool; 0 where the cluster describes none."""
    architecture: Array
    """Code in ARCHITECTURES."""

    replicate: Array
    """Copies of the parameters that see other data."""
    shard: Array
    """Ranks that share a copy as `zero` says, and see other data."""
    context: Array
    """Ranks that split each sequence."""
    tensor_x: Array
    tensor_y: Array
    pipeline: Array
    """Stages."""
    virtual: Array
    """Parts of the model that a rank holds; 1: not interleaved."""
    expert: Array
    """Ranks over which experts are spread; folds over shard, context and tensor."""
    expert_tensor: Array
    """Ranks that split the features of each expert; inside `expert`. 1: each expert is whole."""
    zero: Array
    """What is split over `shard`: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too."""
    sequence_parallel: Array
    """1: what is not split over tensor is split by tokens (arXiv 2205.05198, section 4.2)."""
    micro: Array
    """Sequences of a micro-batch on a rank."""
    paired: Array
    """1: where the order of collectives is searched, micro-batches run in pairs, if there is memory for two
    (`pipeline.in_pairs`)."""
    recompute: Array
    """Code in RECOMPUTE."""
    recomputed: Array
    """Share of the layers that `recompute` holds for, 0 to 1."""
    schedule: Array
    """Code in SCHEDULES."""
    state_on_host: Array
    """Share of the optimizer's state that lies in the host's memory, 0 to 1."""
    activations_on_host: Array
    """Share of what the backward pass needs that waits in the host's memory, 0 to 1."""
    weights_on_host: Array
    """Share of the parameters and gradients that lie in the host's memory between their uses, 0 to 1; above 0 only
    where all of the optimizer's state does."""
    method: Array
    """Code in CONTEXT_METHODS."""
    order: Array
    """Code in ORDERS."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Array: ...

    def __init__(self, **columns: npt.ArrayLike) -> None:
        if columns.keys() != _NAMES:
            raise TypeError(f"a table has other columns; these differ: {sorted(columns.keys() ^ _NAMES)}")
        self.__dict__.update({name: _column(name, columns[name]) for name in COLUMNS})
        self._check()

    def _check(self) -> None:
        sizes = {getattr(self, name).size for name in COLUMNS} - {1}
        if len(sizes) > 1:
            raise ValueError(f"columns of one table are of one length, or of 1; got {sorted(sizes)}")

    @property
    def n(self) -> int:
        """Rows."""
        sizes = {getattr(self, name).size for name in COLUMNS} - {1}
        return sizes.pop() if sizes else 1

    def take(self, index: Any) -> Table:
        """The rows of an index, a slice, an array of indices, or an array of n truth values."""
        rows = np.atleast_1d(np.arange(self.n)[index])
        if rows.size == 1:
            columns = ((name, getattr(self, name)) for name in COLUMNS)
            return Table(**{name: column if column.size == 1 else column[rows] for name, column in columns})
        keep = {name: getattr(self, name) for name in COLUMNS}
        taken = {name: column if column.size == 1 else column[rows] for name, column in keep.items()}
        if rows.size != self.n and all(column.size == 1 for column in taken.values()):
            # All columns hold for all rows: one is written out, which says how many rows there are.
            taken["layers"] = np.repeat(taken["layers"], rows.size)
        return Table(**taken)

    def replaced(self, **columns: npt.ArrayLike) -> Table:
        """This table with other columns; numbers stand for columns of [1]."""
        if not columns.keys() <= _NAMES:
            raise TypeError(f"a table has no columns {sorted(columns.keys() - _NAMES)}")
        table = object.__new__(Table)
        # Searches ask often: columns that stay have been looked at.
        table.__dict__.update(
            self.__dict__, **{name: _column(name, value) for name, value in columns.items()}
        )
        table._check()
        return table

    @classmethod
    def of(cls, workload: Workload, cluster: Cluster, profile: Profile, **spread: npt.ArrayLike) -> Table:
        """One workload on one cluster, spread as the columns of `spread` say; what they leave out is not split.

        `devices` may stand in `spread`; else it is what the cluster says, or the product of the axes. Raises
        ConfigError for a cluster that does not describe its device.
        """
        columns: dict[str, Any] = {**of_workload(workload), **of_cluster(cluster), **of_profile(profile)}
        # A profile states AdamW's bytes; what is beyond two float32 moments is a master copy.
        moments = min(ADAMW, profile.state_bytes)
        columns["state_bytes"] += moments * (state_bytes(workload) / ADAMW - 1)
        columns |= {**UNSEARCHED, **SPREAD, **spread}
        if "devices" not in columns:
            product = math.prod(np.asarray(columns[axis], dtype=np.float64) for axis in DEGREES)
            columns["devices"] = cluster.ranks if cluster.ranks else product
        return cls(**columns)

    @classmethod
    def stacked(cls, tables: Sequence[Table]) -> Table:
        """The rows of all tables, in order. Raises ValueError for none."""
        if not tables:
            raise ValueError("there is no table to stack")
        rows = [table.n for table in tables]

        def column(name: str) -> Array:
            parts = [np.broadcast_to(getattr(table, name), n) for table, n in zip(tables, rows, strict=True)]
            return np.concatenate(parts)

        return cls(**{name: column(name) for name in COLUMNS})


PROFILE_COLUMNS = tuple(
    field.name for field in fields(Profile) if field.name not in ("name", "source", "defaults")
)
COLUMNS = (*WORKLOAD_COLUMNS, *Table.__annotations__, *PROFILE_COLUMNS)
"""The columns' names, in order."""
_NAMES = frozenset(COLUMNS)

SPREAD: Mapping[str, float] = {
    "replicate": 1,
    "shard": 1,
    "context": 1,
    "tensor_x": 1,
    "tensor_y": 1,
    "pipeline": 1,
    "virtual": 1,
    "expert": 1,
    "zero": 0,
    "sequence_parallel": 0,
    "micro": 1,
    "paired": 1,
    "recompute": 0,
    "recomputed": 1,
    "schedule": 0,
    "state_on_host": 0,
    "activations_on_host": 0,
    "weights_on_host": 0,
    "method": 0,
    "order": 0,
}
"""Nothing is split, nothing computed again: what a strategy leaves out."""

DEGREES = ("replicate", "shard", "context", "tensor_x", "tensor_y", "pipeline")
"""Axes whose product is the number of devices."""

UNSEARCHED: Mapping[str, float] = {"expert_tensor": 1}
"""Columns of how a run is spread that only published runs state; the search has no axis for them."""


_FLOPS_ISSUED: Mapping[str, float] = {"volta": 1.0, "ampere": 1.0}
"""Float32 FLOPs of an issued instruction: multiplying and adding counts for two; multiprocessors of V100 and A100 issue
to 128 lanes in a cycle and have 64 for float32, which leaves the others to addresses and conversions."""


def _column(name: str, values: npt.ArrayLike) -> Array:
    column = np.atleast_1d(np.asarray(values, dtype=np.float64))
    if column.ndim != 1:
        raise ValueError(f"the column {name} has {column.ndim} dims; a column has one")
    return column


def of_cluster(cluster: Cluster) -> dict[str, float]:
    """The columns of the machine, with `devices` where the cluster has a number of ranks.

    Raises ConfigError where the cluster describes no device, or no link.
    """
    device = cluster.device
    if device is None:
        raise ConfigError(
            f"the cluster {cluster.title!r} says nothing of its devices; name a preset, or give its "
            "file the section `device`"
        )
    # The table has two levels within the network: nodes and supernodes, or the roots of nodes and nodes.
    near, far = ("root", "node") if cluster.root else ("node", "supernode")
    peak16 = device.peak("bfloat16")
    peak8 = max(peak16, device.matrix.get("float8_e4m3fn", peak16))
    generation = architecture(device.name)
    columns = {
        "node": float(getattr(cluster, near) or math.inf),
        "supernode": float(getattr(cluster, far) or 1),
        "peak16": peak16,
        "peak8": peak8,
        "peak4": max(peak8, device.matrix.get("float4_e2m1fn_x2", peak8)),
        "capacity": device.memory.bytes,
        "hbm": device.memory.read,
        "issue_rate": device.vector.get("float32", peak16 / 16) / _FLOPS_ISSUED.get(generation, 2.0),
        "architecture": float(ARCHITECTURES.index(generation)),
        **_of_host(cluster),
    }
    for column, levels in (
        ("node", (near, far, "network")),
        ("supernode", (far, "network", near)),
        ("network", ("network", far, near)),
    ):
        # A level that a cluster lacks is joined by no group; its column repeats the next one's.
        names = [level for level in levels if level in cluster.links]
        if not names:
            raise ConfigError(
                f"the cluster {cluster.title!r} describes no link between its devices; give "
                "`links` a level node, supernode or network with a bandwidth and a latency"
            )
        columns[f"{column}_rate"] = cluster.link(names[0]).bandwidth
    outer = cluster.links.get("network")
    columns["shared_paths"] = float(outer.shared_paths) if outer else 0.0
    if cluster.ranks:
        columns["devices"] = float(cluster.ranks)
    return columns


def _of_host(cluster: Cluster) -> dict[str, float]:
    """What a device has beside its own memory. Its link's rate, or its part of the host's where that is less."""
    if "host" not in cluster.links or cluster.host is None:
        return {"host_rate": 0.0, "host_bytes": 0.0}
    host, pool = cluster.host, cluster.pool
    # Copies out and back share the host's memory, whose reads and writes share one bandwidth.
    rate = min(cluster.links["host"].reached, min(host.read, host.write) / (2 * host.ranks))
    return {
        "host_rate": rate,
        # A pool is made of hosts' memory, so that a host's part and the pool's are not added up.
        "host_bytes": max(host.bytes / host.ranks, pool.bytes / pool.ranks if pool else 0.0),
    }


def of_profile(profile: Profile) -> dict[str, float]:
    """The columns of what a framework does."""
    return {name: float(getattr(profile, name)) for name in PROFILE_COLUMNS}


def sum_of(parts: dict[str, Array]) -> Array:
    """The parts together."""
    total: Array = np.zeros(1)
    for part in parts.values():
        total = total + part
    return total
