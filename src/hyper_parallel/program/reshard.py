"""Resharding plan between two device groups: which rank sends which elements to which, as plain data.

The two groups may differ in size and mesh, may overlap, and may each be any Layout: uneven splits, several axes on a
dim, fused parts, copies, and partial sums.

A *cell* is a box of the global tensor that lies in one piece of the source and in one piece of the target: the same
source ranks hold all of it and the same target ranks need all of it. Cells partition the tensor. For a cell of S
bytes that k target ranks need and do not hold:

- **A target rank holds it** (the groups overlap): nothing crosses. The others get it from holders in their group.
- **k = 1**: the least loaded holder sends S bytes.
- **k > 1**: the cell is cut into k chunks; each of the k ranks receives one chunk from the least loaded holder, and the
  other k - 1 from its fellows inside the target group. S bytes cross instead of k · S.
  A taker that is in the source group too receives all of it instead: nothing crosses.
- **The source is partial**: the parts of the sum are added inside the source group first, each chunk on one rank (a
  reduce-scatter), and then the rules above hold with that rank as the holder. S bytes cross instead of S for each part.

The cost rule behind these: bytes between the groups count first, since the links inside a group are the faster ones;
then bytes inside a group; then the number of phases. Every target rank receives every byte that it lacks once.

A target that is partial gets the value on the first rank along its partial axes and zeros on the others.

**Backward.** `ReshardPlan.transposed` is the exact adjoint: ⟨A x, y⟩ = ⟨x, Aᵀ y⟩ over the local tensors of all ranks.
Gradients of target replicas are added, and of source replicas the one that sent gets the gradient, the others zeros:
a replicated value has a *partial* gradient, a partial value has a *replicated* one (`adjoint_layout`). Where every
replica computes the full gradient instead, as in tensor parallelism after its own reduction, the gradient's port says
so by its Layout, and `plan_reshard` from that layout takes each element from one replica.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
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
    holders: tuple[tuple[int, ...], ...]
    """By part of the sum, in order of the parts: the ranks that hold a copy of it. One entry if nothing is partial."""
    takers: tuple[int, ...]
    """Target ranks that need the box."""


def cells_of(
    source: DeviceGroup, source_layout: Layout, target: DeviceGroup, target_layout: Layout
) -> list[Cell]:
    """All cells, the largest first: longest processing time first balances what each copy sends.

    Raises StrategyError when the shapes differ, or a layout is not on its group's mesh.
    """
    for group, layout in ((source, source_layout), (target, target_layout)):
        if layout.mesh != group.mesh:
            raise StrategyError(f"{layout} is not on the mesh of {group.name}: {dict(group.mesh.axes)}")
    if source_layout.shape != target_layout.shape:
        raise StrategyError(
            f"{source_layout} in {source.name} cannot become {target_layout} in {target.name}: the shapes differ"
        )
    takers = [(boxes, parts[0]) for boxes, parts in _pieces(target, target_layout)]
    cells: list[tuple[int, int, Cell]] = []
    for held, holders in _pieces(source, source_layout):
        for needed, ranks in takers:
            for box in held:
                for other in needed:
                    common = box.intersect(other)
                    if common is not None:
                        cells.append((-elements(common[0]), len(cells), Cell(*common, holders, ranks)))
    return [cell for _, _, cell in sorted(cells, key=lambda entry: entry[:2])]


def _pieces(
    group: DeviceGroup, layout: Layout
) -> Iterator[tuple[tuple[Box, ...], tuple[tuple[int, ...], ...]]]:
    """The distinct pieces of a tensor, each with the global ranks that hold it, by part of the sum."""
    mesh = layout.mesh
    partial = sorted(layout.partial)
    found: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
    for local, rank in enumerate(group.ranks):
        here = mesh.coordinate(local)
        piece = tuple(mesh.index(axis, here) for axis in layout.split_axes)
        part = tuple(mesh.index(axis, here) for axis in partial)
        found.setdefault(piece, {}).setdefault(part, []).append(rank)
    for parts in found.values():
        ordered = tuple(tuple(parts[part]) for part in sorted(parts))
        yield layout.boxes(group.coordinate(ordered[0][0])), ordered


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


def adjoint_layout(layout: Layout) -> Layout:
    """The layout of the gradient of a value, if each rank has the gradient of its own use of its local tensor.

    Axes that split the value split the gradient. Over an axis of copies the gradient is partial: each copy has its
    share. Over a partial axis the gradient is replicated: each part enters the sum with factor one.

    Raises StrategyError when the copies lie along a part of a joint that the mesh has no name for.

    >>> from hyper_parallel.layout import Mesh
    >>> print(adjoint_layout(Layout(Mesh(("shard", 2), ("tensor", 2)), (8,), (("shard",),))))
    [8/shard]+tensor
    """
    mesh, split = layout.mesh, layout.split_axes
    used = {atom for axis in split for atom in mesh.atoms(axis)}
    folded = {mesh_fold.over for name, mesh_fold in mesh.folds if name in split}
    rest = [name for name in mesh.names if name not in used]
    rest += [name for name, mesh_fold in mesh.folds if name not in split and mesh_fold.over in folded]
    copies = [name for name in rest if mesh.size(name) > 1]
    if math.prod(mesh.size(name) for name in (*split, *copies)) != mesh.world:
        raise StrategyError(f"the copies of {layout} lie along no named axes of {dict(mesh.axes)}")
    partial = frozenset(copies) - layout.partial
    return Layout(mesh, layout.shape, layout.dims, layout.parts, partial)


__all__ = ["Buffer", "Phase", "ReshardPlan", "Transfer", "adjoint_layout", "plan_reshard"]


class Buffer(StrEnum):
    """A rank's local tensor that a phase reads or writes."""

    SOURCE = "source"
    """The rank's part in the source layout."""
    SUM = "sum"
    """Of the shape of SOURCE: the sum over the partial axes, where this rank adds it up."""
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
    """Into the receiver's local tensor of the buffer that the phase writes."""

    @property
    def elements(self) -> int:
        """Elements of the box."""
        return elements(self.give)


@dataclass(frozen=True)
class Phase:
    """Transfers that need nothing of each other; all of one phase precede the next.

    Each adds its box to the receiver's buffer, in the listed order. Every buffer but the plan's input starts as zeros.
    The list is the same on all ranks, so the boxes from one rank to another can travel as one message in its order.
    """

    reads: Buffer
    writes: Buffer
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True)
class ReshardPlan:
    """What moves from one layout on one group to another layout on another group."""

    source: DeviceGroup
    source_layout: Layout
    target: DeviceGroup
    target_layout: Layout
    phases: tuple[Phase, ...]
    """Sums inside the source group, transfers between the groups, gathers inside the target group; empty ones left out.
    The output is the buffer that is not the input: TARGET, or SOURCE of a transposed plan."""
    is_transposed: bool = False

    def crossing(self) -> int:
        """Elements over links between the groups: the two ranks are not both in one of the groups."""
        groups = set(self.source.ranks), set(self.target.ranks)
        return sum(
            one.elements
            for one in self._moved()
            if not any(one.sender in ranks and one.receiver in ranks for ranks in groups)
        )

    def moved(self) -> int:
        """Elements over links of any kind."""
        return sum(one.elements for one in self._moved())

    def sent(self) -> dict[int, int]:
        """Elements that each rank sends to others; ranks that send nothing are left out."""
        sent: dict[int, int] = {}
        for one in self._moved():
            sent[one.sender] = sent.get(one.sender, 0) + one.elements
        return sent

    def _moved(self) -> Iterator[Transfer]:
        return (one for phase in self.phases for one in phase.transfers if one.sender != one.receiver)

    def of(self, rank: int) -> ReshardPlan:
        """The same plan with the transfers of one rank only: what that rank executes."""
        phases = (
            replace(p, transfers=tuple(t for t in p.transfers if rank in (t.sender, t.receiver)))
            for p in self.phases
        )
        return replace(self, phases=tuple(phase for phase in phases if phase.transfers))

    def transposed(self) -> ReshardPlan:
        """The adjoint: gradients in the target's shapes to gradients in the source's, summed in order of ranks."""
        phases = []
        for phase in reversed(self.phases):
            back = [Transfer(t.receiver, t.sender, t.take, t.give) for t in phase.transfers]
            back.sort(key=lambda t: (t.receiver, t.sender))
            phases.append(Phase(phase.writes, phase.reads, tuple(back)))
        return replace(self, phases=tuple(phases), is_transposed=not self.is_transposed)


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

    Raises StrategyError when the shapes differ, or a layout is not on its group's mesh.
    """
    planner = _Planner(source, target, {} if load is None else load)
    partial = any(source_layout.mesh.size(axis) > 1 for axis in source_layout.partial)
    for cell in cells_of(source, source_layout, target, target_layout):
        if partial:
            planner.summed(cell)
        else:
            planner.copied(cell)
    phases = (
        Phase(Buffer.SOURCE, Buffer.SUM, tuple(planner.sums)),
        Phase(Buffer.SUM if partial else Buffer.SOURCE, Buffer.TARGET, tuple(planner.cross)),
        Phase(Buffer.TARGET, Buffer.TARGET, tuple(planner.gather)),
    )
    return ReshardPlan(
        source, source_layout, target, target_layout, tuple(phase for phase in phases if phase.transfers)
    )


class _Planner:
    """The transfers of the three phases, and what each rank sends so far."""

    def __init__(self, source: DeviceGroup, target: DeviceGroup, load: dict[int, int]) -> None:
        self.sums: list[Transfer] = []
        self.cross: list[Transfer] = []
        self.gather: list[Transfer] = []
        self.source = frozenset(source.ranks)
        self.target = frozenset(target.ranks)
        self.load = load
        for rank in (*source.ranks, *target.ranks):
            load.setdefault(rank, 0)
        self.owned = dict.fromkeys(source.ranks, 0)

    def copied(self, cell: Cell) -> None:
        """A cell of a source that is not partial: one copy of it suffices."""
        (holders,) = cell.holders
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

    def summed(self, cell: Cell) -> None:
        """A cell of a partial source: each chunk is added up on one rank, which is its only holder from then on."""
        anyone = sorted(rank for copies in cell.holders for rank in copies)
        near = [rank for rank in anyone if rank in self.target]
        owners = [rank for rank in near if rank in cell.takers] or near or anyone
        landings = self._landings(cell.takers)
        chunks = cut(cell.give, cell.take, len(owners) if near else len(landings))
        for index, (give, take) in enumerate(chunks):
            owner = min(owners, key=lambda rank: (self.owned[rank], self.load[rank], rank))
            self.owned[owner] += elements(give)
            for copies in cell.holders:
                self._move(self.sums, owner if owner in copies else self._lightest(copies), owner, give, give)
            if not near:
                self._land(owner, landings[index], cell.takers, give, take)
                continue
            for taker in cell.takers:
                self._move(self.cross, owner, taker, give, take)

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
