"""A device group: global ranks that form a mesh of their own.

Coordinates are local to the group: the rank at place p of `ranks` is at the coordinate of p in `mesh`. Training with
one mesh has one group, of all ranks, in which place and rank are the same number. Stages of a pipeline are groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hyper_parallel.errors import StrategyError
from hyper_parallel.layout.mesh import Mesh
from hyper_parallel.strategy import Strategy


@dataclass(frozen=True)
class DeviceGroup:
    """Global ranks and their mesh.

    >>> DeviceGroup(Mesh(("shard", 2), ("tensor_x", 2)), range(4, 8), "stage 1").groups("shard")
    ((4, 6), (5, 7))
    """

    mesh: Mesh
    ranks: Sequence[int]
    """Global ranks, one for each place of the mesh."""
    name: str = "all ranks"

    def __post_init__(self) -> None:
        if len(set(self.ranks)) != len(self.ranks):
            raise StrategyError(f"device group {self.name!r} names a rank twice: {tuple(self.ranks)}")
        if len(self.ranks) != self.mesh.world:
            raise StrategyError(
                f"device group {self.name!r} has {len(self.ranks)} ranks, and its axes multiply to {self.mesh.world}"
            )

    @classmethod
    def of_all_ranks(cls, mesh: Mesh) -> DeviceGroup:
        """The group of a run that has one mesh."""
        return cls(mesh, range(mesh.world))

    @classmethod
    def of_pipeline(cls, strategy: Strategy) -> tuple[DeviceGroup, ...]:
        """The device groups of a strategy's pipeline, in its order, each with the mesh of one stage.

        >>> DeviceGroup.of_pipeline(Strategy(axes={"pipeline": 2, "shard": 2}))[1].ranks
        (2, 3)
        """
        axes, mesh = strategy.axes, Mesh.of(strategy)
        order = [(axis, axes.degree(axis)) for axis in axes.order]
        order.insert(axes.outside, ("pipeline", axes.pipeline))
        found: list[list[int]] = [[] for _ in range(axes.pipeline)]
        for rank in range(axes.world):
            found[Mesh(*order).coordinate(rank)["pipeline"]].append(rank)
        return tuple(cls(mesh, tuple(ranks), f"pipeline rank {place}") for place, ranks in enumerate(found))

    @classmethod
    def of_submodels(cls, strategies: Mapping[str, Strategy]) -> tuple[DeviceGroup, ...]:
        """The device groups of submodels, by name, one after the other; of one with a pipeline a group for each of its
        places.

        >>> DeviceGroup.of_submodels({"vision": Strategy(), "language": Strategy(axes={"tensor": 2})})[1].ranks
        (1, 2)
        """
        found, first = list[DeviceGroup](), 0
        for name, strategy in strategies.items():
            groups = cls.of_pipeline(strategy)
            for place, group in enumerate(groups):
                ranks = tuple(first + rank for rank in group.ranks)
                found.append(cls(group.mesh, ranks, f"{name} {place}" if len(groups) > 1 else name))
            first += strategy.axes.world
        return tuple(found)

    def place(self, rank: int) -> int:
        """The place of a global rank in the mesh. In a group of one every process is that rank."""
        if self.mesh.world == 1:
            return 0
        assert rank in self.ranks, f"rank {rank} is not one of {tuple(self.ranks)}"
        return self.ranks.index(rank)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Axis name to index of a global rank of the group."""
        return self.mesh.coordinate(self.place(rank))

    def index(self, name: str, rank: int) -> int:
        """The index of a global rank along an axis, joint or fold."""
        return self.mesh.index(name, self.coordinate(rank))

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """The sets of global ranks that an axis, joint or fold makes, each in the order of the mesh."""
        return tuple(tuple(self.ranks[place] for place in places) for places in self.mesh.groups(name))
