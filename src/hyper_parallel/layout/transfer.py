"""Resharding plan: which rank sends which elements to which, from one Layout to another.

Every element that a rank needs comes from a rank that holds it: from itself if it does, else from the holder nearest
in rank order, since neighbours share the fastest links. If the source is partial, each part is sent and the receiver
adds them up. If the target is partial, the first rank along the partial axes gets the value, the others zeros.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hyper_parallel.errors import StrategyError
from hyper_parallel.layout.layout import Box, Layout


@dataclass(frozen=True)
class Transfer:
    """A box of elements: `give` are slices into the sender's local tensor, `take` into the receiver's."""

    sender: int
    receiver: int
    give: tuple[slice, ...]
    take: tuple[slice, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of the box."""
        return tuple(part.stop - part.start for part in self.give)


@functools.lru_cache(maxsize=32)
def transfers(source: Layout, target: Layout) -> tuple[Transfer, ...]:
    """All transfers, in order of receiver and then of sender, including those within a rank.

    The two meshes may name and order their axes differently, over the same ranks.

    Raises StrategyError when the layouts are of different shapes or numbers of ranks.
    """
    if source.shape != target.shape or source.mesh.world != target.mesh.world:
        raise StrategyError(
            f"{source} on {source.mesh.world} ranks cannot become {target} on {target.mesh.world}; "
            "give two layouts of one shape over the same ranks"
        )
    pieces = _pieces(source)
    found: list[Transfer] = []
    for receiver in range(target.mesh.world):
        coordinate = target.mesh.coordinate(receiver)
        if any(target.mesh.index(axis, coordinate) for axis in target.partial):
            continue
        mine: list[Transfer] = []
        needed = target.boxes(coordinate)
        for boxes, holders in pieces:
            common = [both for theirs in boxes for own in needed if (both := theirs.intersect(own))]
            if common:
                for copies in holders:
                    sender = min(copies, key=lambda rank: (abs(rank - receiver), rank))
                    mine += [Transfer(sender, receiver, give, take) for give, take in common]
        found += sorted(mine, key=lambda transfer: transfer.sender)
    return tuple(found)


def elements_moved(source: Layout, target: Layout) -> int:
    """Elements that cross between ranks, over all ranks."""
    return sum(math.prod(one.shape) for one in transfers(source, target) if one.sender != one.receiver)


def _pieces(layout: Layout) -> Sequence[tuple[tuple[Box, ...], Sequence[Sequence[int]]]]:
    """The distinct pieces of a tensor, each with the ranks that hold it, listed per partial sum."""
    mesh = layout.mesh
    partial = sorted(layout.partial)
    ranks: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
    for rank in range(mesh.world):
        here = mesh.coordinate(rank)
        piece = tuple(mesh.index(axis, here) for axis in layout.split_axes)
        part = tuple(mesh.index(axis, here) for axis in partial)
        ranks.setdefault(piece, {}).setdefault(part, []).append(rank)
    return [
        (layout.boxes(mesh.coordinate(next(iter(parts.values()))[0])), list(parts.values()))
        for parts in ranks.values()
    ]
