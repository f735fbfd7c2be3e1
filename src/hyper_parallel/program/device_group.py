"""Device group: a named set of ranks with a mesh of its own."""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.errors import StrategyError
from hyper_parallel.layout import Mesh
from hyper_parallel.layout.mesh import Coordinate


@dataclass(frozen=True)
class DeviceGroup:
    """Ranks of a run that run the same program. Mesh coordinates are local to the group.

    >>> stage = DeviceGroup("stage 1", (4, 5, 6, 7), Mesh(("shard", 2), ("tensor_x", 2)))
    >>> stage.coordinate(6)
    {'shard': 1, 'tensor_x': 0}
    """

    name: str
    ranks: tuple[int, ...]
    """Global ranks, in the order of the mesh's own."""
    mesh: Mesh

    def __post_init__(self) -> None:
        if len(set(self.ranks)) != len(self.ranks):
            raise StrategyError(f"device group {self.name!r} names a rank twice: {self.ranks}")
        if len(self.ranks) != self.mesh.world:
            raise StrategyError(
                f"device group {self.name!r} has {len(self.ranks)} ranks, and its axes multiply to {self.mesh.world}"
            )

    def local(self, rank: int) -> int:
        """The rank's place in the mesh. Raises ValueError for a rank of another group."""
        return self.ranks.index(rank)

    def coordinate(self, rank: int) -> Coordinate:
        """The rank's coordinate in the group's mesh. Raises ValueError for a rank of another group."""
        return self.mesh.coordinate(self.local(rank))
