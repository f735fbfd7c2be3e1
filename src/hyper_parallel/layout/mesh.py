"""A mesh of ranks with named axes: arithmetic only, no process group and no torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hyper_parallel.strategy import Strategy


@dataclass(frozen=True)
class Mesh:
    """Named axes with sizes, outer to inner; rank r has the mixed-radix digits of r as its coordinate.

    >>> mesh = Mesh(("shard", 2), ("tensor", 4))
    >>> mesh.coordinate(5)
    {'shard': 1, 'tensor': 1}
    """

    axes: tuple[tuple[str, int], ...]

    def __init__(self, *axes: tuple[str, int]) -> None:
        names = [name for name, _ in axes]
        assert len(set(names)) == len(names), f"an axis stands twice in {names}"
        object.__setattr__(self, "axes", tuple((str(name), int(size)) for name, size in axes))

    @classmethod
    def of(cls, strategy: Strategy) -> Mesh:
        """The mesh that a Strategy declares, in its declared order; axes of degree 1 are kept."""
        return cls(*((axis, strategy.axes.degree(axis)) for axis in strategy.axes.order))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes, outer to inner."""
        return tuple(name for name, _ in self.axes)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return math.prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """The degree of an axis; 1 for an axis that the mesh does not have."""
        return dict(self.axes).get(axis, 1)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Axis name to index for one rank, 0 ≤ rank < world. On a mesh of one rank every process is that rank."""
        if self.world == 1:
            return dict.fromkeys(self.names, 0)
        assert 0 <= rank < self.world, f"rank {rank} of {self.world}"
        coordinate: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, coordinate[name] = divmod(rank, size)
        return dict(reversed(coordinate.items()))

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank at a coordinate; axes that it leaves out count as 0."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coordinate.get(name, 0)
        return rank

    def peers(self, rank: int, axes: tuple[str, ...]) -> Iterator[int]:
        """The ranks that differ from `rank` along `axes` only, itself included, in order of those axes."""
        here = self.coordinate(rank)
        for indices in itertools.product(*(range(self.size(axis)) for axis in axes)):
            yield self.rank({**here, **dict(zip(axes, indices, strict=True))})
