"""Cells: the boxes of a tensor that one piece of a source layout and one piece of a target layout have in common."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

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
