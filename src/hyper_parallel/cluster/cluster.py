"""Cluster: the topology of ranks (PCIe roots, nodes, supernodes), devices, memory tiers and links.

    copy(B) = α + B / min(β, share of source's read, of target's write)          `Cluster.copy_seconds`
    host(R, W) = (R / read + W / write) · sharing ranks / `HOST_SHARE`           `Cluster.host_seconds`

`cluster.collective_cost` has the closed forms of collectives. Devices of a node that cannot reach each other's memory
write into the host's what others read from there, all n devices of a host at once; the rate of one is

    β = min(β of its link, β of its link to the host, `THROUGH_HOST` / (n (1 / read + 1 / write)))    `Cluster.link`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, Field

from hyper_parallel.cluster.collective_cost import BY_LEVELS, Leg, TokenDispatch, form, legs
from hyper_parallel.cluster.device import CollectiveTable, CopyTable, Device, Link, Shared, Tier
from hyper_parallel.cluster.efficiency import Count
from hyper_parallel.errors import ConfigError
from hyper_parallel.layout.mesh import Mesh
from hyper_parallel.strategy import LEVELS, Strategy
from hyper_parallel.workload.work import Work

HOST_SHARE = 0.5
"""Share of its memory bandwidth that a host reaches in an optimizer update, 0 to 1: an estimate."""
THROUGH_HOST = 0.73
"""Share of its memory bandwidth that a host reaches in passing on what its devices send each other, 0 to 1: eight
devices with 28 GB/s each way on 16 channels of DDR5-4800 (all-reduce of RTX 5090, issue 1639 of NVIDIA's collectives).
"""
HOST_BANDWIDTH = 2e10
"""B/s that one rank's share of a host reads or writes if the cluster describes no host: an estimate, about one channel
of DDR4.
"""


Algorithm = str | TokenDispatch | None
"""How collectives over several link levels run: `flat`, by `levels`, or None for levels where the ranks allow it. A
TokenDispatch: as None, and tokens go to experts as it says."""


@dataclass(frozen=True)
class Cluster:
    """Devices in rank order, grouped into nodes and supernodes.

    >>> Cluster(node=4).radices(range(8))
    (('network', 2), ('node', 4))
    """

    node: Count | None = None
    """Devices in a node; None if all are in one."""
    supernode: Count | None = None
    """Devices in a supernode; None if the network joins the nodes directly."""

    root: Count | None = None
    """Devices below one PCIe switch or root complex; None where all devices of a node reach each other alike."""
    peer_to_peer: bool = True
    """Whether devices of a node reach each other's memory; else what they send passes through the host's."""

    device: Device | None = field(default=None, hash=False)
    """The device; None if only the levels are known."""
    links: Mapping[str, Link] = field(default_factory=dict, hash=False)
    """Links by level, and by the tier that a device's link leads to."""
    host: Tier | None = None
    """The host memory of a node."""
    pool: Tier | None = None
    """Memory that many devices share: that of other hosts, or unused device memory."""
    flash: Tier | None = None
    source: str = ""
    """The source of the numbers, in a sentence."""
    name: str = ""
    ranks: Annotated[
        Annotated[int, Field(ge=1, strict=True)] | None,
        Field(validation_alias=AliasChoices("devices", "ranks")),
    ] = field(default=None, metadata={"key": "devices"})
    """Total number of devices; None if open. A file has it as `devices`; `ranks` is read too."""
    collectives: tuple[CollectiveTable, ...] = ()
    """Measured collectives, which take precedence over the closed forms."""
    copies: tuple[CopyTable, ...] = ()
    """Measured copies between tiers, which take precedence over the closed form."""
    shared: Mapping[int, Shared] = field(default_factory=dict, hash=False)
    """The machine as each worker sees it, by the number of workers that share its cores. Empty if every worker has its
    own device.
    """
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    """The source of each number, by its dotted path."""
    estimates: Mapping[str, str] = field(default_factory=dict, hash=False)
    """How each number that is not public was estimated, by its dotted path."""

    @property
    def title(self) -> str:
        """Its name; the source of its numbers where it has none."""
        return self.name or self.source

    def __post_init__(self) -> None:
        assert not self.supernode or self.supernode % (self.node or 1) == 0, "whole nodes in a supernode"
        if self.root and (not self.node or self.node % self.root):
            raise ValueError(f"root: {self.root} devices below a root do not divide a node of {self.node}")
        if self.root and self.supernode:
            raise ValueError("root and supernode: nodes of a supernode have no roots; leave one out")
        if not self.peer_to_peer and not (self.host and "host" in self.links):
            raise ValueError(
                "peer_to_peer: false: what devices send passes through the host's memory, which is not described; "
                "give host and links.host"
            )

    @classmethod
    def preset(cls, name: str) -> Cluster:
        """A published machine, `h100`; `cluster.presets.names()` lists them. Raises ConfigError for another name."""
        from hyper_parallel.cluster.files import build
        from hyper_parallel.cluster.presets.names import preset

        machine = preset(name)
        return build(cls, machine, machine["name"])

    @classmethod
    def named(cls, name: str) -> Cluster:
        """A preset with a number of devices (`h100x2048`) or without (`h100`), or a cluster file by its path.

        Raises ConfigError for an unknown name, with the nearest one.
        """
        from hyper_parallel.cluster.presets.names import is_file, name_and_ranks

        if is_file(name):
            return cls.load(name)
        machine, ranks = name_and_ranks(name)
        preset = cls.preset(machine)
        return preset if ranks is None else replace(preset, name=name.lower(), ranks=ranks)

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Load a YAML file that `dump` or `hyper-parallel calibrate` wrote. Raises ConfigError if it is invalid."""
        from hyper_parallel.cluster.files import load

        return load(cls, path)

    def dump(self, path: str | Path) -> None:
        """Write the YAML file that `load` reads back as an equal cluster."""
        from hyper_parallel.cluster.files import text

        Path(path).write_text(text(self), encoding="utf-8")

    @classmethod
    def of(cls, strategy: Strategy, local_world: int | None = None) -> Cluster:
        """The levels on which a strategy is placed.

        `local_world` is the number of ranks that a launcher starts on each node, None if unknown. `placement.devices`
        takes precedence over it, and it takes precedence over the product of the placed axes.
        """
        placement, axes = strategy.placement, strategy.axes
        node = placement.devices.node or local_world
        if node is None and placement.placed:
            node = placement.joined(axes, "node")
        supernode = placement.devices.supernode
        if supernode is None and placement.supernode:
            supernode = placement.joined(axes, "supernode")
        if supernode is not None and node is not None and supernode % node:
            # A supernode derived from degrees does not hold whole nodes: only the nodes are known.
            supernode = None
        return cls(node, supernode)

    @property
    def levels(self) -> tuple[str, ...]:
        """The cluster's levels, innermost first. The last one joins all ranks."""
        known = tuple(level for level in ("root", *LEVELS) if getattr(self, level, None))
        return (*known, "network") if known else ("node",)

    def island(self, rank: int, level: str) -> int:
        """The index of a rank's root, node or supernode. The network has index 0 only."""
        size = getattr(self, level, None)
        return rank // size if size else 0

    def radices(self, ranks: Iterable[int]) -> tuple[tuple[str, int], ...] | None:
        """A group of ranks as a product of levels, outermost first: (level, how many it joins), above 1 only.

        The ranks in ascending order are the mixed-radix numbers of the product. None if the parts differ in size, so
        that no such product exists.
        """
        members: Sequence[int] = sorted(ranks)
        found: list[tuple[str, int]] = []
        for level in self.levels:
            parts: dict[int, int] = {}
            for member in members:
                island = self.island(member, level)
                parts[island] = parts.get(island, 0) + 1
            counts = set(parts.values())
            if len(counts) != 1:
                return None
            if (count := counts.pop()) > 1:
                found.append((level, count))
            # One member of each island stands for it on the next level.
            first: dict[int, int] = {}
            for member in members:
                first.setdefault(self.island(member, level), member)
            members = sorted(first.values())
        return tuple(reversed(found))

    def spans(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """The levels that a group of ranks has links on, innermost first."""
        members = list(ranks)
        inside, levels = len(members), []
        for level in self.levels:
            islands = len({self.island(member, level) for member in members})
            if islands < inside:
                levels.append(level)
            inside = islands
        return tuple(levels)

    def legs(
        self, kind: str, bytes: float, ranks: int | Iterable[int], algorithm: Algorithm = None
    ) -> list[Leg]:
        """The steps of a collective, in order, each on one level; one step on the slowest level if it runs flat.

        `ranks` are the group's global ranks, or their number, counted from rank 0. `algorithm`: "levels", "flat", or
        None: by levels if the ranks allow it. Raises ConfigError for unknown kinds and algorithms.
        """
        form(kind)
        if algorithm not in (None, "levels", "flat") and not isinstance(algorithm, TokenDispatch):
            raise ConfigError(f"a collective's algorithm is 'levels' or 'flat'; got {algorithm!r}")
        members = list(range(ranks)) if isinstance(ranks, int) else list(ranks)
        if len(members) < 2:
            return []
        radices = self.radices(members) if algorithm != "flat" and kind in BY_LEVELS else None
        if radices is not None:
            return legs(kind, bytes, radices)
        level = min(self.spans(members), key=lambda level: self.link(level).reached)
        return [Leg(kind, level, len(members), bytes)]

    def collective_seconds(
        self, kind: str, bytes: float, ranks: int | Iterable[int], algorithm: Algorithm = None
    ) -> float:
        """Seconds of a collective in which each rank gives `bytes`; arguments and errors as of `legs`.

        0 for a group of one. Measured times for the kind and number of ranks take precedence.
        """
        members = range(ranks) if isinstance(ranks, int) else list(ranks)
        return sum(self.leg_seconds(leg) for leg in self.legs(kind, bytes, members, algorithm))

    def slowest(self, groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Of groups of ranks that send at the same time, the one over the slowest links."""
        by_levels = {self.spans(ranks): ranks for ranks in reversed(groups)}
        return max(by_levels.values(), key=lambda ranks: self.collective_seconds("send", 1 << 20, ranks))

    def leg_seconds(self, leg: Leg) -> float:
        """Seconds of one step of a collective on its level, alone on the link."""
        tables = [table for table in self.collectives if (table.kind, table.level) == (leg.kind, leg.level)]
        if tables:
            # The closest number of ranks that was measured: exactly, or carried over by the closed form's α and β.
            table = min(tables, key=lambda table: abs(table.ranks - leg.ranks))
            return table.seconds(leg.bytes, leg.ranks)
        link = self.link(leg.level)
        return link.setup + form(leg.kind)(leg.ranks, leg.bytes, link.latency, link.reached)

    def link(self, level: str) -> Link:
        """The link of a level or to a tier; within a node, as fast as its host lets devices without peer-to-peer be.

        Raises ConfigError if the cluster does not describe it.
        """
        if level not in self.links:
            there = ", ".join(self.links) or "none"
            raise ConfigError(
                f"the cluster {self.name or self.source!r} describes no link {level!r} (it has {there}); "
                f"give links.{level} a bandwidth and a latency, or keep the ranks within the levels it describes"
            )
        return self._through_host(self.links[level]) if self.passes_host(level) else self.links[level]

    def passes_host(self, level: str) -> bool:
        """Whether what devices send on a level passes through the host's memory."""
        return not self.peer_to_peer and level in ("root", "node")

    def _through_host(self, link: Link) -> Link:
        """The link at the rate of which a device writes to the host's memory and another one reads it there.

        A device sends and receives at once, over the two directions of its link to the host.
        """
        assert self.host is not None
        memory = THROUGH_HOST / (self.host.ranks * (1 / self.host.read + 1 / self.host.write))
        return replace(link, bandwidth=min(link.reached, self.links["host"].reached, memory), efficiency=1.0)

    def tier(self, name: str) -> Tier:
        """A memory tier: `device`, `host`, `pool` or `flash`. Raises ConfigError if the cluster has no such tier."""
        found = {
            "device": self.device.memory if self.device else None,
            "host": self.host,
            "pool": self.pool,
            "flash": self.flash,
        }
        tier = found.get(name)
        if tier is None:
            there = ", ".join(key for key, value in found.items() if value) or "none"
            raise ConfigError(
                f"the cluster {self.name or self.source!r} has no memory {name!r} (it has {there})"
            )
        return tier

    def copy_seconds(self, source: str, target: str, bytes: float, ranks: int = 1) -> float:
        """Seconds of one device's copy between two of its tiers, alone on its link.

        `ranks` devices copy at once, each over its own link; those that share a tier share its bandwidth.
        """
        for table in self.copies:
            if (table.source, table.target) == (source, target):
                return table.seconds(bytes)
        here, there = self.tier(source), self.tier(target)
        latency = here.latency + there.latency
        bandwidth = min(here.read / min(ranks, here.ranks), there.write / min(ranks, there.ranks))
        outer = target if source == "device" else source
        if outer in self.links:
            latency += self.links[outer].latency
            bandwidth = min(bandwidth, self.links[outer].reached)
        return latency + bytes / bandwidth

    def host_seconds(self, work: Work, ranks: int = 1) -> float:
        """Seconds of a memory-bound computation on the host, such as an optimizer update.

        `ranks` ranks do so at once; those of a host share its bandwidth.
        """
        if self.host is None:
            return (work.read + work.written) / HOST_BANDWIDTH
        sharing = min(ranks, self.host.ranks)
        return (work.read / self.host.read + work.written / self.host.write) * sharing / HOST_SHARE

    def _taken(self, workers: int) -> int | None:
        """Devices of a supernode that a job takes: the most that divide it, if that is at least half of them."""
        if not self.supernode or workers <= self.supernode:
            return self.supernode
        equal = range(self.node or 1, self.supernode + 1, self.node or 1)
        most = max((count for count in equal if workers % count == 0), default=0)
        return most if 2 * most >= self.supernode else self.supernode

    def for_workers(self, workers: int) -> Cluster:
        """This cluster as each of `workers` concurrent workers sees it; unchanged if each has its own device, except
        that a job on several supernodes takes equally many devices of each: 256 workers 64 of a rack's 72.

        For a number that was not measured the next measured one is used, with its rates divided among more workers if
        it is smaller: an estimate.
        """
        if not self.shared or workers <= 1:
            return replace(self, supernode=self._taken(workers))
        measured = min((n for n in self.shared if n >= workers), default=max(self.shared))
        found = self.shared[measured]
        device = found.device if workers <= measured else found.device.slowed(workers / measured)
        device = replace(device, memory=replace(device.memory, ranks=workers))
        return replace(self, device=device, collectives=found.collectives, ranks=workers)


def misplaced(strategy: Strategy, cluster: Cluster) -> list[str]:
    """One line for each axis that spans more than its level, with the consequence.

    >>> strategy = Strategy(axes={"shard": 16}, placement={"node": ["shard"], "devices": {"node": 8}})
    >>> misplaced(strategy, Cluster.of(strategy))
    ['shard (16) is placed on node but spans node 8 · network 2: its collectives run level by level']
    """
    placement, mesh = strategy.placement, Mesh.of(strategy)
    lines = []
    for level in LEVELS:
        for axis in getattr(placement, level):
            if mesh.size(axis) == 1:
                continue
            # Groups at a boundary may lie differently from the first: the one on the most levels is reported.
            ranks = max(mesh.groups(axis), key=lambda ranks: len(cluster.spans(ranks)))
            spanned = cluster.spans(ranks)
            if spanned == (level,):
                continue
            head = f"{axis} ({mesh.size(axis)}) is placed on {level} but"
            radices = cluster.radices(ranks)
            if radices is None:
                lines.append(
                    f"{head} lies on {' and '.join(spanned)} in unequal parts: its collectives run flat"
                )
            elif len(spanned) > 1:
                parts = " · ".join(f"{name} {size}" for name, size in reversed(radices))
                how = "level by level" if placement.collectives == "levels" else "flat"
                lines.append(f"{head} spans {parts}: its collectives run {how}")
            else:
                lines.append(f"{head} fits into {spanned[0]}, and lies there")
    return lines
