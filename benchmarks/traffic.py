"""Bytes and messages that a collective sends across link levels.

The count is the bytes that *leave an island* (a node or a supernode), divided by the group's members in it, so that
figures of different groups can be added and compared with one device's share of the slow link. Assumptions about flat
collectives:

- `all_gather`, `reduce_scatter`, `all_reduce` and the like: a ring in rank order, each of whose links carries what a
  rank receives. With n ranks, g of them in each island, one of an island's g links crosses. `order="worst"` is a ring
  that leaves the island at each link, as when ranks are distributed to the islands round-robin.
- `all_to_all`: every rank sends to every other directly.
- `broadcast`, `reduce`, `scatter`, `gather`: as a chain, counted like the ring.
- `send`: one message.

A collective that runs level by level is several calls, each over a group on one level, and needs no assumption.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, Protocol

from hyper_parallel.cluster import Cluster


class CollectiveCall(Protocol):
    """One call of a collective; `compat.collectives.Collective` is one."""

    @property
    def kind(self) -> str:
        """`all_reduce`, `all_gather`, …"""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the group."""

    @property
    def bytes_in(self) -> int:
        """Bytes that each rank gives."""

    @property
    def bytes_received(self) -> int:
        """Bytes that each rank gets from others."""


@dataclass(frozen=True)
class Crossing:
    """Traffic that leaves an island, per member of the group in it."""

    bytes: Fraction = Fraction(0)
    messages: Fraction = Fraction(0)

    def __add__(self, other: Crossing) -> Crossing:
        return Crossing(self.bytes + other.bytes, self.messages + other.messages)


def crossing(
    calls: Iterable[CollectiveCall], cluster: Cluster, level: str, order: Literal["rank", "worst"] = "rank"
) -> Crossing:
    """The traffic of the calls out of islands of `level` ("node" or "supernode"), for the island that sends most."""
    total = Crossing()
    for call in calls:
        total += _one(call, cluster, level, order)
    return total


def _one(call: CollectiveCall, cluster: Cluster, level: str, order: str) -> Crossing:
    islands = [cluster.island(rank, level) for rank in call.ranks]
    if len(set(islands)) < 2:
        return Crossing()
    if call.kind in ("send", "recv"):
        return Crossing(Fraction(call.bytes_in), Fraction(1)) if call.kind == "send" else Crossing()
    size = len(islands)
    if call.kind == "all_to_all":
        # Each member sends to everybody outside; the emptiest island has most outside.
        outside = size - min(islands.count(island) for island in set(islands))
        return Crossing(Fraction(call.bytes_received * outside, size - 1), Fraction(outside))
    # As many messages pass over a link as a ring has steps.
    steps = {"all_reduce": 2 * (size - 1), "all_gather": size - 1, "reduce_scatter": size - 1}.get(
        call.kind, 1
    )
    share = Fraction(1)
    if order == "rank":
        leaving: dict[int, int] = {}
        for here, there in zip(islands, [*islands[1:], islands[0]], strict=True):
            leaving[here] = leaving.get(here, 0) + (here != there)
        share = max(Fraction(links, islands.count(island)) for island, links in leaving.items())
    return Crossing(call.bytes_received * share, steps * share)
