"""Values between device groups of unlike meshes: every rank gets what its layout says, whatever the two meshes."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.graph.graph_writer import span
from hyper_parallel.graph.ir import StepGraph, Value
from hyper_parallel.graph.partition import Crossing
from hyper_parallel.graph.stage_graph import Partition, Stage
from hyper_parallel.layout import DeviceGroup, Layout, Mesh
from hyper_parallel.program import Port, Program, Recv, Send, Wait
from hyper_parallel.runtime.rank_transfers import MemoryTransfers, memory_channels
from hyper_parallel.runtime.reshard_transfers import KnownPorts, ReshardTransfers
from hyper_parallel.runtime.stage_runner import flat, shaped

MESHES = [
    (("tensor_x", 1),),
    (("tensor_x", 2),),
    (("shard", 2),),
    (("shard", 2), ("tensor_x", 2)),
    (("shard", 3),),
]


def _group(name: str, first: int, axes: tuple[tuple[str, int], ...]) -> DeviceGroup:
    mesh = Mesh(*axes)
    return DeviceGroup(mesh, tuple(range(first, first + mesh.world)), name)


def _layout(group: DeviceGroup, shape: tuple[int, ...], dim: int) -> Layout:
    layout = Layout.replicated(group.mesh, shape)
    return layout.split(dim, "shard") if "shard" in group.mesh.names else layout


def _crossing(layout: Layout, group: DeviceGroup, rank: int, transposed: bool) -> Crossing:
    """As the group's own graph has it: a view of other strides, or a dense one."""
    shape = layout.local_shape(group.coordinate(rank))
    stride = torch.empty(shape[::-1]).t().stride() if transposed else torch.empty(shape).stride()
    return Crossing("x", 0, 1, "forward", Value(shape, stride, torch.float32, torch.device("cpu"), 0), "x")


def _local(whole: Tensor, layout: Layout, group: DeviceGroup, rank: int) -> Tensor:
    (box,) = layout.boxes(group.coordinate(rank))
    return whole[box.global_slices]


@pytest.mark.parametrize("seed", range(12))
def test_each_rank_gets_its_part(seed: int) -> None:
    draw = random.Random(seed)
    source, target = (_group(name, first, draw.choice(MESHES)) for name, first in (("a", 0), ("b", 8)))
    whole = torch.randn(12, 6, generator=torch.Generator().manual_seed(seed))
    dims = draw.randrange(2), draw.randrange(2)
    there, here = _layout(source, (12, 6), dims[0]), _layout(target, (12, 6), dims[1])
    name = "forward.x.0-1"
    port = Port(name, there, "float32", "a", {"b": here})
    send, recv = Send(name, 0, "b"), Recv(name, 0, "a")
    program = Program({"a": source, "b": target}, {}, {name: port}, {"a": (send,), "b": (recv,)}, 1)
    channels = memory_channels(16)

    def run(rank: int) -> Tensor | None:
        group, layout = (source, there) if rank in source.ranks else (target, here)
        one = _crossing(layout, group, rank, draw.random() < 0.5)
        made = ReshardTransfers(
            program, _partition(one), rank, MemoryTransfers(rank, channels, 10.0), torch.device("cpu")
        )
        if rank in source.ranks:
            value = torch.empty_strided(one.value.shape, one.value.stride)
            made.send(send, flat(value.copy_(_local(whole, there, source, rank)), one))
            made.wait(Wait(name, 0, "b"))
            return None
        made.post(recv)
        found = made.wait(Wait(name, 0, "a"))
        assert found.shape == (span(one.value),)
        return shaped(found, one)

    ranks = [*source.ranks, *target.ranks]
    with ThreadPoolExecutor(len(ranks)) as pool:
        for rank, found in zip(ranks, pool.map(run, ranks), strict=True):
            if found is not None:
                assert torch.equal(found, _local(whole, here, target, rank)), (rank, str(there), str(here))


def test_copies_that_differ_are_an_error() -> None:
    source, target = _group("a", 0, (("tensor_x", 2),)), _group("b", 2, (("tensor_x", 1),))
    layout = Layout.replicated(source.mesh, (4, 4))
    name = "forward.x.0-1"
    port = Port(name, layout, "float32", "a", {"b": Layout.replicated(target.mesh, (4, 4))})
    send = Send(name, 0, "b")
    program = Program({"a": source, "b": target}, {}, {name: port}, {"a": (send,), "b": ()}, 1)
    one = _crossing(layout, source, 0, transposed=False)
    value = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))

    def sent(other: Tensor) -> None:
        """Rank 0 has `value`, and the rank beside it `other`."""

        def largest(mine: Tensor) -> Tensor:
            x = other.double().reshape(-1)
            seen = x @ torch.arange(16.0, dtype=torch.float64).mul(1.618).cos()
            return torch.maximum(mine, torch.stack([seen, -seen, x.norm()]))

        made = ReshardTransfers(
            program,
            _partition(one),
            0,
            MemoryTransfers(0, memory_channels(3), 10.0),
            torch.device("cpu"),
            known=KnownPorts(largest),
        )
        made.send(send, flat(value, one))

    sent(value.clone())
    with pytest.raises(HyperParallelError, match="ranks of a have unlike values of forward"):
        sent(value + torch.randn(4, 4, generator=torch.Generator().manual_seed(1)))


def _partition(one: Crossing) -> Partition:
    step: StepGraph = None  # type: ignore[assignment]
    return Partition(
        (Stage(0, step, (), (one,), (), ()), Stage(1, step, (one,), (), (), ())), MappingProxyType({})
    )
