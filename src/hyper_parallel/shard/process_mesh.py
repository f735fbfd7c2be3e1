"""The mesh of processes: the cluster that a strategy is placed on, process groups of axes, and the place in a pipeline.

Everything that turns a rank into a coordinate, or an axis into a process group, goes by `ProcessMesh`, and it is local
to its device group: ranks are global, coordinates are those of the group's own mesh.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.cluster import Cluster, misplaced
from hyper_parallel.cluster.presets import preset_of
from hyper_parallel.compat import backend, collectives
from hyper_parallel.errors import ConfigError, StrategyError
from hyper_parallel.graph.ir import CollectiveGroup
from hyper_parallel.layout.mesh import DeviceGroup, Mesh
from hyper_parallel.shard.mesh_axis import Axis, Levels, Part
from hyper_parallel.strategy import Strategy

ROW_AXES = ("replicate", "shard")
"""The axes along which ranks see different rows."""
DATA_AXES = "*".join(ROW_AXES)
"""The joint of them."""
LOSS_AXES = (*ROW_AXES, "context")
"""The axes over which the ranks' parts of a loss are summed; ranks along the others hold the same part."""


class ProcessMesh(Mapping[str, Axis]):
    """The axes of a device group by name, joints and folds too.

    Looking one up the first time makes its process group, which every rank of the group must do in the same order: the
    engine does so while it parallelizes, never in a forward pass.
    """

    def __init__(self, devices: DeviceGroup, cluster: Cluster | None = None, connected: bool = True) -> None:
        """With a `cluster`, collectives over groups that span its levels run level by level. One that is not
        `connected` has no process groups, and only axes of degree 1. Raises StrategyError for ranks that do not ascend,
        since the ranks of a process group do."""
        if list(devices.ranks) != sorted(devices.ranks):
            raise StrategyError(
                f"device group {devices.name!r}: its ranks {tuple(devices.ranks)} must ascend"
            )
        self.devices, self.mesh, self.connected = devices, devices.mesh, connected
        self._cluster = cluster
        self._axes: dict[str, Axis] = {}
        self._made: dict[str, dist.ProcessGroup] = {}
        self._members: dict[str, CollectiveGroup] = {}
        if connected:
            whole: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
            everyone = whole if self._of_all_ranks else self._new_group(devices.ranks)
            self._everyone = str(everyone.group_name)
            self._note(self._everyone, self.mesh.joint(*self.mesh.names), devices.ranks)

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        cluster: Cluster | None = None,
        *,
        alone: bool = False,
        stage: DeviceGroup | None = None,
    ) -> ProcessMesh:
        """The mesh of all processes, or of those of a pipeline's `stage`; of this one `alone`, or where there is no
        process group.

        Raises StrategyError when the default process group is not one of `mesh.world` ranks.
        """
        if stage is not None:
            return cls(DeviceGroup(mesh, stage.ranks, stage.name), cluster)
        devices = DeviceGroup.of_all_ranks(mesh)
        if alone or not dist.is_initialized():
            if mesh.world > 1:
                raise StrategyError(
                    f"the strategy's axes multiply to {mesh.world}, but this process is alone; "
                    "start it with hyper-parallel or torchrun, and call torch.distributed.init_process_group"
                )
            return cls(devices, connected=False)
        if dist.get_world_size() != mesh.world:
            degrees = " · ".join(f"{axis} {size}" for axis, size in mesh.axes if size > 1)
            raise StrategyError(
                f"the strategy's axes multiply to {mesh.world} ({degrees or 'one rank'}), "
                f"but there are {dist.get_world_size()} workers"
            )
        return cls(devices, cluster)

    def __getitem__(self, name: str) -> Axis:
        if name not in self._axes:
            self._axes[name] = self._axis(name)
        return self._axes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.mesh.names)

    def __len__(self) -> int:
        return len(self.mesh.names)

    @property
    def cluster(self) -> Cluster | None:
        """The one along whose levels collectives run; None where each is one flat call."""
        return self._cluster

    # Ranks.

    @property
    def rank(self) -> int:
        """This process's global rank; that of its device when the mesh is of one."""
        return dist.get_rank() if self.mesh.world > 1 else int(self.devices.ranks[0])

    @property
    def coordinate(self) -> dict[str, int]:
        """This rank's index on each axis."""
        return self.devices.coordinate(self.rank)

    def data_index_of(self, rank: int) -> int:
        """The index of the share of the batch that a global rank computes, 0 ≤ index < replicate · shard."""
        return self.devices.index(DATA_AXES, rank)

    def speaks(self, axes: tuple[str, ...], rank: int) -> float:
        """1 on one rank of those that differ along other axes than these, 0 on the others: they hold the same, and one
        of them speaks for all."""
        return float(
            all(index == 0 for axis, index in self.devices.coordinate(rank).items() if axis not in axes)
        )

    # Collectives.

    def all_reduce(self, tensor: torch.Tensor, axes: tuple[str, ...], op: str = "sum") -> torch.Tensor:
        """The sum (or ``max``) of `tensor` over `axes`, on every rank of them; its own over axes of degree 1."""
        live = [axis for axis in axes if self.mesh.size(axis) > 1]
        if live and math.prod(self.mesh.size(axis) for axis in live) == self.mesh.world:
            return collectives.all_reduce(tensor, self._everyone, op)
        for axis in live:
            tensor = collectives.all_reduce(tensor, self[axis].group, op)
        return tensor

    def greatest(self, values: list[float]) -> list[float]:
        """The greatest of each over all ranks of the mesh. A collective."""
        with torch.no_grad():
            mine = torch.tensor(values, dtype=torch.float64, device=collectives.device_type())
            greatest: list[float] = self.all_reduce(mine, self.mesh.names, "max").tolist()
            return greatest

    def any(self, flags: list[bool]) -> list[bool]:
        """Whether each flag is set on some rank of the mesh. A collective."""
        return [bool(value) for value in self.greatest([float(flag) for flag in flags])]

    # Process groups.

    def process_groups(self) -> dict[str, CollectiveGroup]:
        """Each group that has been made, and that of all ranks of the mesh, by name; empty on one device.

        Those of an axis's levels are of that axis; their ranks say on which level.
        """
        return dict(self._members)

    def group(self, axis: str) -> dist.ProcessGroup:
        """This rank's process group of an axis, joint or fold. Its ranks stand in ascending order."""
        if axis not in self._made:
            self._made[axis] = self._mine_of(axis, self.devices.groups(axis))
        return self._made[axis]

    @property
    def _of_all_ranks(self) -> bool:
        return len(self.devices.ranks) == dist.get_world_size()

    def _new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Groups inside of a device group are made by its ranks alone: others make their own meanwhile."""
        group: dist.ProcessGroup = dist.new_group(
            list(ranks), use_local_synchronization=not self._of_all_ranks
        )
        return group

    def _mine_of(self, axis: str, groups: Sequence[tuple[int, ...]]) -> dist.ProcessGroup:
        """The process group of this rank, of groups that all ranks make together."""
        mine = dist.get_rank()
        wanted = groups if self._of_all_ranks else [ranks for ranks in groups if mine in ranks]
        groups_made = [(self._new_group(ranks), ranks) for ranks in wanted]
        group, ranks = next(pair for pair in groups_made if mine in pair[1])
        self._note(str(group.group_name), axis, ranks)
        return group

    def _note(self, name: str, axis: str, ranks: Sequence[int]) -> None:
        self._members[name] = CollectiveGroup(name, axis, tuple(ranks))

    def _axis(self, name: str) -> Axis:
        if self.mesh.size(name) == 1:
            return Axis(name, self.devices, "")
        assert self.connected, f"axis {name} needs process groups"
        order = tuple(
            self.mesh.index(name, self.mesh.coordinate(place)) for place in self.mesh.groups(name)[0]
        )
        in_order = order == tuple(range(len(order)))
        group = str(self.group(name).group_name)
        return Axis(name, self.devices, group, None if in_order else order, self._levels(name))

    def _levels(self, axis: str) -> Levels | None:
        """The groups of an axis level by level; None where it lies on one level, or unevenly."""
        groups = self.devices.groups(axis)
        ways = {self._cluster.radices(ranks) for ranks in groups} if self._cluster else {None}
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
        return Levels(tuple(parts), str(self.group(axis).group_name))

    # FSDP2's meshes.

    @property
    def carries_tensor(self) -> bool:
        """Whether tensor-split parameters can be DTensors: one tensor axis, a mesh dim beside those of FSDP2."""
        return self.mesh.size("tensor_x") > 1 and self.mesh.size("tensor_y") == 1

    @functools.cached_property
    def whole(self) -> DeviceMesh:
        """The device mesh of all ranks: replicate, storage, tensor_x. FSDP2 wants its mesh and that of the DTensors
        it is given to be parts of one."""
        names = ("replicate", self.mesh.storage, "tensor_x")
        return DeviceMesh(
            collectives.device_type(), self._members_by_index(names, self.devices.ranks), mesh_dim_names=names
        )

    def device_mesh(self, *axes: str) -> DeviceMesh:
        """This rank's device mesh of one or two axes, joints or folds, as FSDP2 takes it."""
        if self.carries_tensor and set(axes) <= set(self.whole.mesh_dim_names or ()):
            return self.whole[axes if len(axes) > 1 else axes[0]]
        joint = next(ranks for ranks in self.devices.groups("*".join(axes)) if dist.get_rank() in ranks)
        members = self._members_by_index(axes, joint)
        groups = [self.group(axis) for axis in axes]
        return DeviceMesh.from_group(
            groups if len(axes) > 1 else groups[0], collectives.device_type(), members, mesh_dim_names=axes
        )

    def _members_by_index(self, axes: tuple[str, ...], ranks: Sequence[int]) -> torch.Tensor:
        """int64 [size of each axis]: the rank of `ranks` at each index along the axes."""
        members = torch.empty([self.mesh.size(axis) for axis in axes], dtype=torch.int64)
        for rank in ranks:
            members[tuple(self.devices.index(axis, rank) for axis in axes)] = rank
        return members


@dataclass(frozen=True)
class PipelinePlace:
    """The device groups in the order of the pipeline, or of the submodels' declaration, and the group of this rank."""

    groups: tuple[DeviceGroup, ...]
    index: int
    """Of this rank's group."""
    owners: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Name of a parameter or buffer to the groups that hold it, ascending; empty before the model is cut, when every
    group counts as a holder."""
    submodels: bool = False
    """The groups have submodels of their own: one that a micro-batch does not need has no gradients in it."""

    @classmethod
    def of(cls, strategy: Strategy, rank: int) -> PipelinePlace | None:
        """The place of a rank of the run; None without a pipeline."""
        if strategy.axes.pipeline == 1:
            return None
        groups = DeviceGroup.of_pipeline(strategy)
        for index, group in enumerate(groups):
            if rank in group.ranks:
                return cls(groups, index)
        raise StrategyError(
            f"the strategy's axes multiply to {strategy.axes.world}, and this is rank {rank}; start that many workers"
        )

    @property
    def devices(self) -> DeviceGroup:
        """This rank's group."""
        return self.groups[self.index]

    @property
    def alike(self) -> tuple[int, ...]:
        """The ranks of the run whose groups have the mesh of this one's."""
        return tuple(
            sorted(rank for group in self.groups if group.mesh == self.devices.mesh for rank in group.ranks)
        )

    def holders(self, name: str) -> tuple[DeviceGroup, ...]:
        """The groups that hold a parameter or buffer."""
        return tuple(self.groups[index] for index in self.owners.get(name, range(len(self.groups))))

    def owns(self, name: str) -> bool:
        """Whether this rank's group holds it."""
        return self.index in self.owners.get(name, (self.index,))

    def counts(self, name: str) -> bool:
        """Whether this rank's group is the first that holds it, and so speaks for it in sums over all ranks."""
        return self.owners.get(name, (self.index,))[0] == self.index


log = logging.getLogger(__name__)


def placed_on(strategy: Strategy) -> Cluster | None:
    """The cluster whose levels collectives run along; None where each collective is one flat call.

    Every rank calls it. Rank 0 logs a warning for each axis that spans more than the level it is placed on.

    Raises StrategyError when the nodes have different numbers of ranks and the file does not give a number.
    """
    placement = strategy.placement
    if not placement.given or not dist.is_initialized() or strategy.axes.world == 1:
        return None
    cluster = Cluster.of(strategy, None if placement.devices.node else _local_world())
    if dist.get_rank() == 0:
        for line in misplaced(strategy, cluster):
            log.warning("%s", line)
    return cluster if placement.collectives == "levels" else None


def _local_world() -> int | None:
    """Ranks on each node, from the launcher's environment; None where it is unset or ranks are simulated."""
    if dist.get_backend() == "fake":
        return None
    # 0 where it is unset, so that all ranks notice when only some have it.
    mine = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    group = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    given = torch.tensor([mine, -mine], device=collectives.device_type())
    most, least = collectives.all_reduce(given, group, "max").tolist()
    if most != -least:
        raise StrategyError(
            f"nodes have between {-least} and {most} ranks (LOCAL_WORLD_SIZE), which are no levels to place axes on; "
            "start as many on each node, or set strategy.placement.devices.node"
        )
    return mine or None


def planning_cluster(strategy: Strategy, section: Literal["overlap", "memory"], kind: str) -> Cluster | None:
    """The machine by which a section of the strategy is planned; None where nothing is known of the device.

    Raises ConfigError for a cluster that is not known or has no device.
    """
    name = getattr(strategy, section).cluster
    if name is not None:
        cluster = Cluster.named(name).for_workers(strategy.axes.world)
        if cluster.device is None:
            raise ConfigError(
                f"strategy.{section}.cluster: {name} describes no device, without which nothing can be simulated; "
                "give it a device, or leave it out"
            )
        return cluster
    known = preset_of(backend(kind).device_name())
    if known is None:
        return None
    found, node = Cluster.preset(known), strategy.placement.devices.node
    return replace(found, node=node) if node else found
