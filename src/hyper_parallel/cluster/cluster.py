"""Cluster: the topology of ranks (nodes, supernodes), devices, memory tiers and links.

    copy(B) = α + B / min(β, share of source's read, of target's write)          `Cluster.copy_seconds`
    host(R, W) = (R / read + W / write) · sharing ranks / `HOST_SHARE`           `Cluster.host_seconds`

The closed forms of collectives stand in `cluster.collective`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hyper_parallel.cluster.collective import BY_LEVELS, Leg, form, legs
from hyper_parallel.cluster.device import Device, Link, Tier
from hyper_parallel.cluster.measured import CollectiveTable, CopyTable, Shared
from hyper_parallel.cluster.numbers import Count
from hyper_parallel.errors import ConfigError
from hyper_parallel.strategy import LEVELS, Strategy
from hyper_parallel.workload.work import Work

HOST_SHARE = 0.5
"""The share of its memory's bandwidth that a host reaches in an update of the optimizer, 0 to 1: an estimate."""
HOST_BANDWIDTH = 2e10
"""B/s that one rank's part of a host reads or writes where a cluster describes no host: an estimate, about one channel
of DDR4."""


@dataclass(frozen=True)
class Cluster:
    """Devices in rank order, so many to a node and so many to a supernode.

    >>> Cluster(node=4).radices(range(8))
    (('network', 2), ('node', 4))
    """

    node: Count | None = None
    """Devices in a node; None where all are in one."""
    supernode: Count | None = None
    """Devices in a supernode; None where there is none, and nodes are joined by the network."""

    device: Device | None = field(default=None, hash=False)
    """What every device is; None where only the levels are known."""
    links: Mapping[str, Link] = field(default_factory=dict, hash=False)
    """By level, and by the tier that a device's link leads to."""
    host: Tier | None = None
    """A node's own memory beside its devices'."""
    pool: Tier | None = None
    """Memory that many devices share: of other hosts, or of devices that do not use theirs."""
    flash: Tier | None = None
    source: str = ""
    """Where the numbers come from, in a sentence."""
    name: str = ""
    ranks: Count | None = None
    """Devices in all; None where that is open."""
    collectives: tuple[CollectiveTable, ...] = ()
    """Measured collectives; they go before the closed forms."""
    copies: tuple[CopyTable, ...] = ()
    """Measured copies between tiers; they go before the closed form."""
    shared: Mapping[int, Shared] = field(default_factory=dict, hash=False)
    """By how many workers compute on this machine at once: what it is for each. Empty where every worker has a device
    of its own."""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Where each number comes from, by its dotted path."""
    estimates: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Numbers that are not public, by their dotted path, and how each was estimated."""

    def __post_init__(self) -> None:
        assert not self.supernode or self.supernode % (self.node or 1) == 0, "whole nodes in a supernode"

    @classmethod
    def preset(cls, name: str) -> Cluster:
        """A published machine, `h100`; `cluster.presets.names()` lists them. Raises ConfigError for another name."""
        from hyper_parallel.cluster.presets import preset

        return preset(name)

    @classmethod
    def named(cls, name: str) -> Cluster:
        """`h100x2048`: a preset with so many devices; `h100` alone leaves that open; or a cluster file's path.

        Raises ConfigError for a name that is not known, with the nearest.
        """
        from hyper_parallel.cluster.presets import named

        return named(name)

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """From a YAML file, which `dump` or `hyper-parallel calibrate` wrote. Raises ConfigError for what is wrong."""
        from hyper_parallel.cluster.files import load

        return load(path)

    def dump(self, path: str | Path) -> None:
        """Write the YAML file that `load` reads back as an equal cluster."""
        from hyper_parallel.cluster.files import text

        Path(path).write_text(text(self), encoding="utf-8")

    @classmethod
    def of(cls, strategy: Strategy, local_world: int | None = None) -> Cluster:
        """The levels that a strategy is placed on.

        `local_world` is how many ranks a launcher starts on each node, None where it does not say. What stands in
        `placement.devices` goes before it, and it goes before what the placed axes multiply to.
        """
        placement, axes = strategy.placement, strategy.axes
        node = placement.devices.node or local_world
        if node is None and placement.placed:
            node = placement.joined(axes, "node")
        supernode = placement.devices.supernode
        if supernode is None and placement.supernode:
            supernode = placement.joined(axes, "supernode")
        if supernode is not None and node is not None and supernode % node:
            # A supernode that was worked out from degrees and does not hold whole nodes: the nodes are what is known.
            supernode = None
        return cls(node, supernode)

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels that there are, innermost first. The last one joins all ranks."""
        known = tuple(level for level in LEVELS if getattr(self, level, None))
        return (*known, "network") if known else ("node",)

    def island(self, rank: int, level: str) -> int:
        """The index of the node, or supernode, that a rank is in. The network is one."""
        size = getattr(self, level, None)
        return rank // size if size else 0

    def radices(self, ranks: Iterable[int]) -> tuple[tuple[str, int], ...] | None:
        """A group of ranks as a product of levels, outermost first: (level, how many it joins), above 1 only.

        The ranks in ascending order count through the product like digits. None where the parts differ in size, so
        that there is no such product.
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
        self, kind: str, bytes: float, ranks: int | Iterable[int], algorithm: str | None = None
    ) -> list[Leg]:
        """The parts of a collective, in order, each on one level; one part on the slowest level if it runs flat.

        `ranks` are the group's global ranks, or how many there are, from rank 0 on. `algorithm`: "levels", "flat",
        or None for by levels where the ranks lie so. Raises ConfigError for kinds and algorithms that are not known.
        """
        form(kind)
        if algorithm not in (None, "levels", "flat"):
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
        self, kind: str, bytes: float, ranks: int | Iterable[int], algorithm: str | None = None
    ) -> float:
        """How long a collective takes to which each rank gives `bytes`; arguments and errors as of `legs`.

        0 for a group of one. Where this machine was measured for the kind and the number of ranks, that is taken.
        """
        members = range(ranks) if isinstance(ranks, int) else list(ranks)
        return sum(self.leg_seconds(leg) for leg in self.legs(kind, bytes, members, algorithm))

    def leg_seconds(self, leg: Leg) -> float:
        """How long a part of a collective takes on its level, alone on the link."""
        tables = [table for table in self.collectives if (table.kind, table.level) == (leg.kind, leg.level)]
        if tables:
            # The closest number of ranks that was measured: exactly, or carried over by the closed form's α and β.
            table = min(tables, key=lambda table: abs(table.ranks - leg.ranks))
            return table.seconds(leg.bytes, leg.ranks)
        link = self.link(leg.level)
        return link.setup + form(leg.kind)(leg.ranks, leg.bytes, link.latency, link.reached)

    def link(self, level: str) -> Link:
        """The link of a level or to a tier. Raises ConfigError where the cluster does not describe it."""
        if level not in self.links:
            there = ", ".join(self.links) or "none"
            raise ConfigError(
                f"the cluster {self.name or self.source!r} describes no link {level!r} (it has {there}); "
                f"give links.{level} a bandwidth and a latency, or keep the ranks within the levels it describes"
            )
        return self.links[level]

    def tier(self, name: str) -> Tier:
        """A memory: `device`, `host`, `pool` or `flash`. Raises ConfigError where the cluster has none."""
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
        """How long one device's copy between two of its tiers takes, alone on its link.

        `ranks` devices copy at once, each over a link of its own; those that share a tier share its bandwidth.
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
        """How long the host takes over what only walks over its memory, as an update of the optimizer does.

        `ranks` ranks do so at once; those of a host share its bandwidth.
        """
        if self.host is None:
            return (work.read + work.written) / HOST_BANDWIDTH
        sharing = min(ranks, self.host.ranks)
        return (work.read / self.host.read + work.written / self.host.write) * sharing / HOST_SHARE

    def for_workers(self, workers: int) -> Cluster:
        """This cluster as it is when so many workers compute at once; itself where each has its own device.

        Of a number that was not measured, the next measured one is taken, its rates divided among more workers if it
        is smaller: an estimate.
        """
        if not self.shared or workers <= 1:
            return self
        measured = min((n for n in self.shared if n >= workers), default=max(self.shared))
        found = self.shared[measured]
        device = found.device if workers <= measured else found.device.slowed(workers / measured)
        device = replace(device, memory=replace(device.memory, ranks=workers))
        return replace(self, device=device, collectives=found.collectives, ranks=workers)
