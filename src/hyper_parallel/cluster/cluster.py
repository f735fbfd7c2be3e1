"""Link levels of a machine: which ranks share a node, which a supernode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hyper_parallel.strategy import LEVELS, Strategy


@dataclass(frozen=True)
class Cluster:
    """Devices in rank order, so many to a node and so many to a supernode.

    >>> Cluster(node=4).radices(range(8))
    (('network', 2), ('node', 4))
    """

    node: int | None = None
    """Devices in a node; None where all are in one."""
    supernode: int | None = None
    """Devices in a supernode; None where there is none, and nodes are joined by the network."""

    def __post_init__(self) -> None:
        assert not self.supernode or self.supernode % (self.node or 1) == 0, "whole nodes in a supernode"

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
