"""Meshes of processes: coordinates and collectives that are local to a device group."""

from __future__ import annotations

import pytest
import torch

from harness import run_ranks
from hyper_parallel.layout.layout import Layout
from hyper_parallel.layout.mesh import DeviceGroup, Mesh
from hyper_parallel.shard.process_mesh import ProcessMesh
from hyper_parallel.shard.reshard import cut, gathered

WHOLE = torch.arange(12.0).view(6, 2)


def test_ranks_are_global_and_coordinates_are_local() -> None:
    group = DeviceGroup(Mesh(("shard", 2), ("tensor_x", 2)), (1, 3, 6, 7))
    assert group.coordinate(6) == {"shard": 1, "tensor_x": 0}
    assert group.index("shard*tensor_x", 7) == 3
    assert group.groups("tensor_x") == ((1, 3), (6, 7))
    assert group.groups("shard") == ((1, 6), (3, 7))
    with pytest.raises(AssertionError, match="rank 2 is not one of"):
        group.coordinate(2)


def _two_groups(rank: int, world: int) -> list[object]:
    """Ranks 0 and 1 split over tensor_x, ranks 2 to 4 over shard; each group makes and uses its own process groups."""
    mesh, ranks = (Mesh(("tensor_x", 2)), (0, 1)) if rank < 2 else (Mesh(("shard", 3)), (2, 3, 4))
    axes = ProcessMesh(DeviceGroup(mesh, ranks))
    (name,) = mesh.names
    layout = Layout(mesh, tuple(WHOLE.shape), ((name,), ()))
    local = cut(WHOLE, layout, axes.coordinate)
    mine = torch.tensor([float(rank)])
    return [
        axes.coordinate[name],
        axes.data_index_of(rank),
        float(axes.all_reduce(mine, mesh.names)),
        axes[name].gather(mine, 0).tolist(),
        bool(gathered(axes, local, layout).equal(WHOLE)),
        sorted(group.ranks for group in axes.process_groups().values()),
    ]


def test_device_groups_with_other_meshes_work_beside_each_other() -> None:
    first = [1.0, [0.0, 1.0], True, [(0, 1), (0, 1)]]
    second = [9.0, [2.0, 3.0, 4.0], True, [(2, 3, 4), (2, 3, 4)]]
    assert run_ranks(_two_groups, 5) == [
        [0, 0, *first],
        [1, 0, *first],
        [0, 0, *second],
        [1, 1, *second],
        [2, 2, *second],
    ]
