"""Resharding plan between two device groups: which rank sends which elements to which, as plain data.

The two groups may differ in size and mesh, may overlap, and may each be any Layout that is no pending sum: uneven
splits, several axes on a dim, fused parts, and copies.

A *cell* is a box of the global tensor that lies in one piece of the source and in one piece of the target: the same
source ranks hold all of it and the same target ranks need all of it. Cells partition the tensor. For a cell of S
bytes that k target ranks need and do not hold:

- **A target rank holds it** (the groups overlap): nothing crosses. The others get it from holders in their group.
- **k = 1**: the least loaded holder sends S bytes.
- **k > 1**: the cell is cut into k chunks; each of the k ranks receives one chunk from the least loaded holder, and the
  other k - 1 from its fellows inside the target group. S bytes cross instead of k · S.
  A taker that is in the source group too receives all of it instead: nothing crosses.

The cost rule behind these: bytes between the groups count first, since the links inside a group are the faster ones;
then bytes inside a group; then the number of phases. Every target rank receives every byte that it lacks once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from hyper_parallel.errors import StrategyError
from hyper_parallel.layout import Box, DeviceGroup, Layout

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Cell:
    """A box, who holds it, and who needs it."""

    give: Slices
    """Into the local tensor of every holder."""
    take: Slices
    """Into the local tensor of every taker."""
    holders: tuple[int, ...]
    """Source ranks that hold a copy of the box."""
    takers: tuple[int, ...]
    """Target ranks that need the box."""


def cells_of(
    source: DeviceGroup, source_layout: Layout, target: DeviceGroup, target_layout: Layout
) -> list[Cell]:
    """All cells, the largest first: longest processing time first balances what each copy sends.

    Raises StrategyError when the shapes differ, or a layout is not on its group's mesh or a pending sum.
    """
    for group, layout in ((source, source_layout), (target, target_layout)):
        if layout.mesh != group.mesh:
            raise StrategyError(f"{layout} is not on the mesh of {group.name}: {dict(group.mesh.axes)}")
        if layout.partial:
            raise StrategyError(
                f"{layout} in {group.name} is a pending sum; add it up before it is resharded"
            )
    if source_layout.shape != target_layout.shape:
        raise StrategyError(
            f"{source_layout} in {source.name} cannot become {target_layout} in {target.name}: the shapes differ"
        )
    takers = _pieces(target, target_layout)
    cells: list[tuple[int, int, Cell]] = []
    for held, holders in _pieces(source, source_layout):
        for needed, ranks in takers:
            for box in held:
                for other in needed:
                    common = box.intersect(other)
                    if common is not None:
                        cells.append((-elements(common[0]), len(cells), Cell(*common, holders, ranks)))
    return [cell for _, _, cell in sorted(cells, key=lambda entry: entry[:2])]


def _pieces(group: DeviceGroup, layout: Layout) -> list[tuple[tuple[Box, ...], tuple[int, ...]]]:
    """The distinct pieces of a tensor, each with the global ranks that hold it."""
    found: dict[tuple[int, ...], list[int]] = {}
    for local, rank in enumerate(group.ranks):
        here = layout.mesh.coordinate(local)
        found.setdefault(tuple(layout.mesh.index(axis, here) for axis in layout.split_axes), []).append(rank)
    return [(layout.boxes(group.coordinate(ranks[0])), tuple(ranks)) for ranks in found.values()]


def elements(slices: Slices) -> int:
    """Elements of a box; 1 for a tensor without dims."""
    return math.prod(one.stop - one.start for one in slices)


def cut(give: Slices, take: Slices, count: int) -> list[tuple[Slices, Slices]]:
    """A box in at most `count` chunks along the dim where they are most alike, the outermost of several."""
    if not give:
        return [(give, take)]
    lengths = [one.stop - one.start for one in give]
    dim = min(range(len(lengths)), key=lambda d: -(-lengths[d] // count) * count / lengths[d])
    count = min(count, lengths[dim])
    ends = [lengths[dim] * index // count for index in range(count + 1)]
    return [
        (_part(give, dim, start, stop), _part(take, dim, start, stop))
        for start, stop in itertools.pairwise(ends)
    ]


def _part(slices: Slices, dim: int, start: int, stop: int) -> Slices:
    at = slices[dim].start
    return (*slices[:dim], slice(at + start, at + stop), *slices[dim + 1 :])


class Buffer(StrEnum):
    """A rank's local tensor that a phase reads or writes."""

    SOURCE = "source"
    """The rank's part in the source layout."""
    TARGET = "target"
    """The rank's part in the target layout."""


@dataclass(frozen=True)
class Transfer:
    """A box of elements from one rank to another, or within one. Ranks are global."""

    sender: int
    receiver: int
    give: Slices
    """Into the sender's local tensor of the buffer that the phase reads."""
    take: Slices
    """Into the receiver's local tensor in the target layout."""

    @property
    def elements(self) -> int:
        """Elements of the box."""
        return elements(self.give)


@dataclass(frozen=True)
class Phase:
    """Transfers that need nothing of each other; all of one phase precede the next.

    The list is the same on all ranks, so the boxes from one rank to another can travel as one message in its order.
    """

    reads: Buffer
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True)
class ReshardPlan:
    """What moves from one layout on one group to another layout on another group."""

    source: DeviceGroup
    source_layout: Layout
    target: DeviceGroup
    target_layout: Layout
    phases: tuple[Phase, ...]
    """Transfers between the groups, and gathers inside the target group; empty ones left out."""

    def of(self, rank: int) -> ReshardPlan:
        """The same plan with the transfers of one rank only: what that rank executes."""
        phases = (
            replace(p, transfers=tuple(t for t in p.transfers if rank in (t.sender, t.receiver)))
            for p in self.phases
        )
        return replace(self, phases=tuple(phase for phase in phases if phase.transfers))


def plan_reshard(
    source: DeviceGroup,
    source_layout: Layout,
    target: DeviceGroup,
    target_layout: Layout,
    load: dict[int, int] | None = None,
) -> ReshardPlan:
    """The plan that moves a tensor from one group's layout to another's. The same on every rank.

    `load`: elements that each rank sends in plans made before, to which this plan's are added, so that holders of the
    same share the sending of many tensors.

    Raises StrategyError when the shapes differ, or a layout is not on its group's mesh or a pending sum.
    """
    planner = _Planner(source, target, {} if load is None else load)
    for cell in cells_of(source, source_layout, target, target_layout):
        planner.place(cell)
    phases = (Phase(Buffer.SOURCE, tuple(planner.cross)), Phase(Buffer.TARGET, tuple(planner.gather)))
    return ReshardPlan(
        source, source_layout, target, target_layout, tuple(phase for phase in phases if phase.transfers)
    )


class _Planner:
    """The transfers of both phases, and what each rank sends so far."""

    def __init__(self, source: DeviceGroup, target: DeviceGroup, load: dict[int, int]) -> None:
        self.cross: list[Transfer] = []
        self.gather: list[Transfer] = []
        self.source = frozenset(source.ranks)
        self.target = frozenset(target.ranks)
        self.load = load
        for rank in (*source.ranks, *target.ranks):
            load.setdefault(rank, 0)

    def place(self, cell: Cell) -> None:
        """Have each taker get the cell."""
        holders = cell.holders
        near = [rank for rank in holders if rank in self.target]
        lacking = [rank for rank in cell.takers if rank not in holders]
        for taker in cell.takers:
            if taker in holders:
                self._move(self.cross, taker, taker, cell.give, cell.take)
            elif near:
                self._move(self.cross, self._lightest(near), taker, cell.give, cell.take)
        if lacking and not near:
            landings = self._landings(lacking)
            for landing, (give, take) in zip(
                landings, cut(cell.give, cell.take, len(landings)), strict=False
            ):
                self._land(self._lightest(holders), landing, lacking, give, take)

    def _landings(self, takers: Sequence[int]) -> list[int]:
        """The takers that receive from the source group: those that are in it themselves, or else all."""
        return [rank for rank in takers if rank in self.source] or list(takers)

    def _land(self, sender: int, landing: int, takers: Sequence[int], give: Slices, take: Slices) -> None:
        """A chunk goes to one of the ranks that need it, and from there to the others."""
        self._move(self.cross, sender, landing, give, take)
        for other in takers:
            if other != landing:
                self._move(self.gather, landing, other, take, take)

    def _lightest(self, ranks: Sequence[int]) -> int:
        return min(ranks, key=lambda rank: (self.load[rank], rank))

    def _move(self, to: list[Transfer], sender: int, receiver: int, give: Slices, take: Slices) -> None:
        to.append(Transfer(sender, receiver, give, take))
        if sender != receiver:
            self.load[sender] += elements(give)
