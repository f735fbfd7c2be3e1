"""Process groups by axis name: of axes, joints and folds alike, each made once and in the same order on all ranks."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.cluster import Cluster
from hyper_parallel.compat import collectives
from hyper_parallel.errors import StrategyError
from hyper_parallel.layout.mesh import Mesh
from hyper_parallel.shard.link_levels import Levels, Part


class Groups:
    """The process groups of a mesh. Making one is a collective: every rank asks for the same names in order."""

    def __init__(self, mesh: Mesh, cluster: Cluster | None = None) -> None:
        """With a `cluster`, collectives over groups that span its levels run level by level.

        Raises StrategyError when the default process group is not one of `mesh.world` ranks.
        """
        if dist.get_world_size() != mesh.world:
            degrees = " · ".join(f"{axis} {size}" for axis, size in mesh.axes if size > 1)
            raise StrategyError(
                f"the strategy's axes multiply to {mesh.world} ({degrees or 'one rank'}), "
                f"but there are {dist.get_world_size()} workers"
            )
        self.mesh = mesh
        self.cluster = cluster
        self.device = collectives.device_type()
        self._made: dict[str, dist.ProcessGroup] = {}
        self._members: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._levels: dict[str, Levels | None] = {}

    @classmethod
    def of(cls, mesh: Mesh, cluster: Cluster | None = None) -> Groups | None:
        """The groups of a mesh; None for a mesh of one rank without a process group."""
        if dist.is_initialized():
            return cls(mesh, cluster)
        if mesh.world > 1:
            raise StrategyError(
                f"the strategy's axes multiply to {mesh.world}, but this process is alone; "
                "start it with hyper-parallel or torchrun, and call torch.distributed.init_process_group"
            )
        return None

    def group(self, axis: str) -> dist.ProcessGroup:
        """This rank's process group of an axis, joint or fold. Its ranks stand in ascending order."""
        if axis not in self._made:
            self._made[axis] = self._mine_of(axis, self.mesh.groups(axis))
        return self._made[axis]

    def members(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name of each group that has been made, and of the group of all ranks, to its (axis, ranks).

        Those of an axis's levels are of that axis; their ranks say on which level.
        """
        everyone: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
        whole = self.mesh.joint(*self.mesh.names), tuple(range(self.mesh.world))
        return {str(everyone.group_name): whole, **self._members}

    def _mine_of(self, axis: str, groups: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup:
        """The process group of this rank, of groups that all ranks make together."""
        mine = dist.get_rank()
        made: list[dist.ProcessGroup] = [dist.new_group(list(ranks)) for ranks in groups]
        group, ranks = next(pair for pair in zip(made, groups, strict=True) if mine in pair[1])
        self._members[str(group.group_name)] = (axis, ranks)
        return group

    def name(self, axis: str) -> str:
        """The name of the process group of an axis, joint or fold."""
        return str(self.group(axis).group_name)

    def levels(self, axis: str) -> Levels | None:
        """The groups of an axis, joint or fold level by level; None where it lies on one level, or unevenly."""
        if axis not in self._levels:
            self._levels[axis] = self._make_levels(axis)
        return self._levels[axis]

    def _make_levels(self, axis: str) -> Levels | None:
        groups = self.mesh.groups(axis)
        ways = {self.cluster.radices(ranks) for ranks in groups} if self.cluster else {None}
        if len(ways) > 1:
            return None  # groups lie on the levels differently: no one way serves all ranks
        (radices,) = ways
        if radices is None or len(radices) < 2:
            return None
        parts, outer = [], 1
        for level, size in radices:
            inner = len(groups[0]) // (outer * size)
            split = tuple(
                tuple(ranks[(high * size + at) * inner + low] for at in range(size))
                for ranks in groups
                for high in range(outer)
                for low in range(inner)
            )
            parts.append(Part(level, size, str(self._mine_of(axis, split).group_name)))
            outer *= size
        return Levels(tuple(parts), self.name(axis))

    @property
    def carries_tensor(self) -> bool:
        """Whether tensor-split parameters can be DTensors: one tensor axis, a mesh dim beside those of FSDP2."""
        return self.mesh.size("tensor_x") > 1 and self.mesh.size("tensor_y") == 1

    @functools.cached_property
    def whole(self) -> DeviceMesh:
        """The device mesh of all ranks: replicate, storage, tensor_x. FSDP2 wants its mesh and that of the DTensors
        it is given to be parts of one."""
        names = ("replicate", self.mesh.storage, "tensor_x")
        ranks = torch.empty([self.mesh.size(name) for name in names], dtype=torch.int64)
        for rank in range(self.mesh.world):
            there = self.mesh.coordinate(rank)
            ranks[tuple(self.mesh.index(name, there) for name in names)] = rank
        return DeviceMesh(self.device, ranks, mesh_dim_names=names)

    def device_mesh(self, *axes: str) -> DeviceMesh:
        """This rank's device mesh of one or two axes, joints or folds, as FSDP2 takes it."""
        if self.carries_tensor and set(axes) <= set(self.whole.mesh_dim_names or ()):
            return self.whole[axes if len(axes) > 1 else axes[0]]
        here = self.mesh.coordinate(dist.get_rank())
        joint = next(ranks for ranks in self.mesh.groups("*".join(axes)) if dist.get_rank() in ranks)
        members = torch.empty([self.mesh.size(axis) for axis in axes], dtype=torch.int64)
        for rank in joint:
            there = self.mesh.coordinate(rank)
            members[tuple(self.mesh.index(axis, there) for axis in axes)] = rank
        assert members[tuple(self.mesh.index(axis, here) for axis in axes)] == dist.get_rank()
        groups = [self.group(axis) for axis in axes]
        return DeviceMesh.from_group(
            groups if len(axes) > 1 else groups[0], self.device, members, mesh_dim_names=axes
        )
