"""Layout: the location of each element of a tensor on a mesh; and the transfers from one Layout to another.

A Layout names, for each dim of a tensor, the axes (or joints or folds of axes) that split it, outer to inner.
An axis of size n splits a dim of length L into chunks of ceil(L / n), the last ones shorter or empty (the
convention of ``torch.chunk`` and of DTensor's ``Shard``); the next axis splits these chunks. An axis that splits no dim
holds copies, unless it is named in ``partial``: then the tensor is the sum over that axis.

A fused projection (query, key and value in one matrix) has ``parts`` on the fused dim: the first axis splits
every part on its own and a rank holds its chunks of all parts, one after the other. A rank's local tensor then consists
of several boxes of the global one, which is why all code that moves tensors between layouts (checkpoints, loading,
exporting, verifying) uses `Layout.boxes` and never computes offsets itself.

A dim may have an ``order``: the axes then split its positions, and position i holds the global index order[i]. So are
experts placed on ranks by their loads, while checkpoints keep the model's own numbers.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hyper_parallel.errors import StrategyError
from hyper_parallel.layout.mesh import Coordinate, Mesh

Interval = tuple[int, int]


@dataclass(frozen=True)
class Box:
    """A rectangular piece: `size` elements a dim, at `offset` in the global and at `local` in the local tensor."""

    offset: tuple[int, ...]
    local: tuple[int, ...]
    size: tuple[int, ...]

    def intersect(self, other: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Slices into this box's and the other's *local* tensors for their common global elements.

        None when they have none in common.
        """
        mine, theirs = [], []
        for a, la, sa, b, lb, sb in zip(
            self.offset, self.local, self.size, other.offset, other.local, other.size, strict=True
        ):
            start, stop = max(a, b), min(a + sa, b + sb)
            if start >= stop:
                return None
            mine.append(slice(la + start - a, la + stop - a))
            theirs.append(slice(lb + start - b, lb + stop - b))
        return tuple(mine), tuple(theirs)

    @property
    def global_slices(self) -> tuple[slice, ...]:
        """Slices into the global tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.size, strict=True))

    @property
    def local_slices(self) -> tuple[slice, ...]:
        """Slices into the local tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.local, self.size, strict=True))


def chunk(length: int, count: int, index: int) -> Interval:
    """The half-open interval of chunk `index` when `length` is split into `count` chunks of ceil(L / n)."""
    size = -(-length // count)
    start = min(index * size, length)
    return start, min(start + size, length)


@dataclass(frozen=True)
class Layout:
    """The layout of a tensor of `shape` on `mesh`. `dims[d]` are the axes that split dim d, outer to inner.

    >>> layout = Layout(Mesh(("shard", 2), ("tensor", 2)), (8, 6), (("tensor", "shard"), ()))
    >>> print(layout)
    [8/tensor/shard, 6]
    >>> layout.boxes({"shard": 1, "tensor": 0})
    (Box(offset=(2, 0), local=(0, 0), size=(2, 6)),)
    """

    mesh: Mesh
    shape: tuple[int, ...]
    dims: tuple[tuple[str, ...], ...]
    parts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Dim to the lengths of its fused parts; the dim's first axis splits each part separately."""
    partial: frozenset[str] = frozenset()
    """Axes over which the tensor is a pending sum."""
    order: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Dim to the global index at each of its positions, where that is another one."""

    def __post_init__(self) -> None:
        assert len(self.dims) == len(self.shape), f"{self.dims} for a tensor of {len(self.shape)} dims"
        used = [axis for axes in self.dims for axis in axes]
        assert len(set(used)) == len(used), f"an axis splits two dims in {self.dims}"
        assert not self.partial & set(used), f"an axis is both split and partial in {self}"
        for dim, parts in self.parts.items():
            assert sum(parts) == self.shape[dim], f"parts {parts} of a dim of {self.shape[dim]}"
        for dim, order in self.order.items():
            assert dim not in self.parts, f"dim {dim} has fused parts and an order"
            assert sorted(order) == list(range(self.shape[dim])), f"{order} is no order of {self.shape[dim]}"

    def __hash__(self) -> int:
        parts, order = (tuple(sorted(by_dim.items())) for by_dim in (self.parts, self.order))
        return hash((self.mesh, self.shape, self.dims, parts, self.partial, order))

    @classmethod
    def replicated(cls, mesh: Mesh, shape: tuple[int, ...]) -> Layout:
        """Every rank holds the whole tensor."""
        return cls(mesh, tuple(shape), ((),) * len(shape))

    @property
    def split_axes(self) -> tuple[str, ...]:
        """All axes, joints and folds that split some dim."""
        return tuple(axis for axes in self.dims for axis in axes)

    @property
    def copies(self) -> int:
        """The number of ranks that hold each element."""
        return self.mesh.world // math.prod(self.mesh.size(axis) for axis in self.split_axes)

    def copy_index(self, coordinate: Coordinate) -> int:
        """The index of the copy that the rank at `coordinate` holds: 0 ≤ index < copies."""
        return _copy_indices(self.mesh, self.split_axes)[self.mesh.rank(coordinate)]

    def split(self, dim: int, axis: str, parts: tuple[int, ...] | None = None) -> Layout:
        """This layout with `dim` split once more, by `axis`, inside the axes that already split it."""
        assert parts is None or not self.dims[dim], "only the first axis of a dim splits fused parts"
        dims = tuple((*axes, axis) if d == dim else axes for d, axes in enumerate(self.dims))
        fused = {**self.parts, dim: tuple(parts)} if parts is not None and len(parts) > 1 else self.parts
        return Layout(self.mesh, self.shape, dims, fused, self.partial, self.order)

    def ordered(self, dim: int, order: tuple[int, ...]) -> Layout:
        """This layout with the global index `order[i]` at position i of `dim`."""
        plain = {d: own for d, own in self.order.items() if d != dim}
        changed = {dim: tuple(order)} if tuple(order) != tuple(range(self.shape[dim])) else {}
        return Layout(self.mesh, self.shape, self.dims, self.parts, self.partial, {**plain, **changed})

    def without(self, axis: str) -> Layout:
        """The layout after gathering over `axis`, which must be the innermost axis of its dim."""
        dims = []
        parts = dict(self.parts)
        for dim, axes in enumerate(self.dims):
            if axis in axes:
                assert axes[-1] == axis, f"{axis} is not the innermost axis of dim {dim} in {self}"
                axes = axes[:-1]
                if not axes:
                    parts.pop(dim, None)
            dims.append(axes)
        return Layout(self.mesh, self.shape, tuple(dims), parts, self.partial, self.order)

    def without_dim(self, dim: int) -> Layout:
        """The layout of a tensor that has all of these dims but `dim`; over the axes that split it there are copies."""
        kept = [d for d in range(len(self.shape)) if d != dim]
        parts, order = (
            {kept.index(d): value for d, value in by_dim.items() if d != dim}
            for by_dim in (self.parts, self.order)
        )
        shape, dims = tuple(self.shape[d] for d in kept), tuple(self.dims[d] for d in kept)
        return Layout(self.mesh, shape, dims, parts, self.partial, order)

    def intervals(self, dim: int, coordinate: Coordinate) -> list[Interval]:
        """The half-open intervals of global indices that a rank holds of `dim`, in local order."""
        held = self._positions(dim, coordinate)
        order = self.order.get(dim)
        return held if order is None else list(_runs(order[at] for a, b in held for at in range(a, b)))

    def _positions(self, dim: int, coordinate: Coordinate) -> list[Interval]:
        """The half-open intervals of positions that a rank holds of `dim`, in local order."""
        axes = self.dims[dim]
        held: list[Interval] = [(0, self.shape[dim])]
        if not axes:
            return held
        if dim in self.parts:
            ends = list(itertools.accumulate(self.parts[dim]))
            held = list(zip([0, *ends[:-1]], ends, strict=True))
            n, i = self.mesh.size(axes[0]), self.mesh.index(axes[0], coordinate)
            held = [(a + c, a + d) for a, b in held for c, d in [chunk(b - a, n, i)]]
            axes = axes[1:]
        for axis in axes:
            length = sum(b - a for a, b in held)
            start, stop = chunk(length, self.mesh.size(axis), self.mesh.index(axis, coordinate))
            held = list(_clip(held, start, stop))
        return [(a, b) for a, b in held if a < b]

    def local_shape(self, coordinate: Coordinate) -> tuple[int, ...]:
        """The shape of the tensor that the rank at `coordinate` holds."""
        return tuple(sum(b - a for a, b in self.intervals(dim, coordinate)) for dim in range(len(self.shape)))

    def boxes(self, coordinate: Coordinate) -> tuple[Box, ...]:
        """The pieces of the global tensor that the rank at `coordinate` holds; none if it holds nothing."""
        by_dim: list[list[tuple[int, int, int]]] = []
        for dim in range(len(self.shape)):
            pieces, at = [], 0
            for start, stop in self.intervals(dim, coordinate):
                pieces.append((start, at, stop - start))
                at += stop - start
            by_dim.append(pieces)
        return tuple(
            Box(tuple(p[0] for p in piece), tuple(p[1] for p in piece), tuple(p[2] for p in piece))
            for piece in itertools.product(*by_dim)
        )

    def __str__(self) -> str:
        """``[4096/tensor/shard, 1024]``; fused parts as ``(512+128+128)``, an order as ``4@2.0.1.3``; a trailing
        ``+tensor`` is partial."""
        cells = []
        for dim, (length, axes) in enumerate(zip(self.shape, self.dims, strict=True)):
            fused = self.parts.get(dim)
            name = f"({'+'.join(map(str, fused))})" if fused else str(length)
            if dim in self.order:
                name += f"@{'.'.join(map(str, self.order[dim]))}"
            cells.append("/".join((name, *axes)))
        return f"[{', '.join(cells)}]" + "".join(f"+{axis}" for axis in sorted(self.partial))

    @classmethod
    def parse(cls, text: str, mesh: Mesh) -> Layout:
        """The inverse of ``str``: ``Layout.parse(str(layout), layout.mesh) == layout``."""
        match = re.fullmatch(r"\[(.*)\]((?:\+[\w*]+)*)", text.strip())
        if match is None:
            raise ValueError(f"not a layout: {text!r}; write for example [4096/tensor/shard, 1024]")
        shape, dims, parts, orders = [], [], {}, {}
        for dim, cell in enumerate(filter(None, (c.strip() for c in match[1].split(",")))):
            name, *axes = cell.split("/")
            name, _, order = name.partition("@")
            if order:
                orders[dim] = tuple(int(n) for n in order.split("."))
            lengths = tuple(int(n) for n in name.strip("()").split("+"))
            if name.startswith("("):
                parts[dim] = lengths
            shape.append(sum(lengths))
            dims.append(tuple(axes))
        partial = frozenset(filter(None, match[2].split("+")))
        return cls(mesh, tuple(shape), tuple(dims), parts, partial, orders)


@functools.lru_cache(maxsize=64)
def _copy_indices(mesh: Mesh, split: tuple[str, ...]) -> tuple[int, ...]:
    """By rank: how many ranks before it have the same index along every axis of `split`."""
    seen: dict[tuple[int, ...], int] = {}
    indices = []
    for rank in range(mesh.world):
        here = mesh.coordinate(rank)
        key = tuple(mesh.index(axis, here) for axis in split)
        indices.append(seen.get(key, 0))
        seen[key] = indices[-1] + 1
    return tuple(indices)


def _runs(indices: Iterator[int]) -> Iterator[Interval]:
    """Half-open intervals of the indices, in their order; neighbours that ascend by one are in one interval."""
    start = stop = None
    for index in indices:
        if start is None or index != stop:
            if start is not None and stop is not None:
                yield start, stop
            start = index
        stop = index + 1
    if start is not None and stop is not None:
        yield start, stop


def _clip(held: list[Interval], start: int, stop: int) -> Iterator[Interval]:
    """The part of a list of intervals between positions `start` and `stop` of their concatenation."""
    at = 0
    for a, b in held:
        lo, hi = max(start - at, 0), min(stop - at, b - a)
        if lo < hi:
            yield a + lo, a + hi
        at += b - a


# Resharding plan: which rank sends which elements to which, from one Layout to another.
#
# Every element that a rank needs comes from a rank that holds it: from itself if it does, else from the holder nearest
# in rank order, since neighbours share the fastest links. If the source is partial, each part is sent and the receiver
# adds them up. If the target is partial, the first rank along the partial axes gets the value, the others zeros.


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
