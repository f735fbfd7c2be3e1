"""Collectives level by level: equal to the flat ones, on both drivers, and they send less over the slow level."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from traffic import Crossing, crossing

from harness import run_ranks
from hyper_parallel.cluster import Cluster
from hyper_parallel.compat import collectives
from hyper_parallel.compat.local_tensor import each_rank, on_rank, per_rank, simulated_ranks
from hyper_parallel.layout import Mesh
from hyper_parallel.shard.mesh_axis import Axis
from hyper_parallel.shard.process_mesh import ProcessMesh
from hyper_parallel.strategy import Strategy


def _axes(strategy: Strategy, name: str, cluster: Cluster) -> tuple[Axis, Axis]:
    """The axis level by level, and flat."""
    mesh = Mesh.of(strategy)
    levelled = ProcessMesh.of(mesh, cluster)[name]
    flat = ProcessMesh.of(mesh)[name]
    assert levelled.levels is not None
    assert flat.levels is None
    return levelled, flat


def _values(*shape: int, seed: int = 0) -> Callable[[int], torch.Tensor]:
    """Whole numbers, so that sums are exact in any order; others on each rank."""

    def make(rank: int) -> torch.Tensor:
        return torch.randint(
            -50, 50, shape, generator=torch.Generator().manual_seed(100 * seed + rank)
        ).double()

    return make


MOVES: dict[str, tuple[tuple[int, ...], Callable[[Axis, torch.Tensor], torch.Tensor]]] = {
    "copy": ((3, 5), lambda axis, x: axis.copy(x)),
    "reduce": ((3, 5), lambda axis, x: axis.reduce(x)),
    "reduce a little": ((1,), lambda axis, x: axis.reduce(x)),
    "split": ((3, 21), lambda axis, x: axis.split(x, 1)),
    "gather": ((3, 5), lambda axis, x: axis.gather(x, 1)),
    "gather first": ((5, 3), lambda axis, x: axis.gather(x, 0)),
    "gather_sum": ((3, 5), lambda axis, x: axis.gather_sum(x, 1)),
    "reduce_split": ((3, 21), lambda axis, x: axis.reduce_split(x, 1)),
    "reduce_split first": ((21, 2), lambda axis, x: axis.reduce_split(x, 0)),
    "swap": ((2, 24, 3), lambda axis, x: axis.swap(x, 1, 2)),
    "split, gathered": ((3, 21), lambda axis, x: axis.gather_sum(axis.split(x, 1), 1, 21)),
}


def _moved(axis: Axis, move: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What comes out, and the gradient of a sum with weights that differ by rank and element."""
    shape, function = MOVES[move]
    x = per_rank(_values(*shape)).requires_grad_()
    y = function(axis, x)
    weights = per_rank(lambda rank: _values(*on_rank(y, rank).shape, seed=1)(rank))
    (gradient,) = torch.autograd.grad(y, x, weights)
    return y.detach(), gradient


STRATEGIES = {
    "two nodes": (Strategy(axes={"shard": 8}), "shard", Cluster(4)),
    "three levels": (Strategy(axes={"shard": 8}), "shard", Cluster(2, 4)),
    "joint": (Strategy(axes={"shard": 4, "context": 2}), "shard*context", Cluster(4)),
    # Indices along it are not in the order of ranks.
    "turned": (Strategy(axes={"tensor_x": 4, "tensor_y": 2}), "tensor_y*tensor_x", Cluster(4)),
    "strided": (Strategy(axes={"shard": 4, "tensor": 2}), "shard", Cluster(4)),
    "fold": (Strategy(axes={"shard": 4, "tensor": 2, "expert": 4}), "expert", Cluster(2)),
}


@pytest.mark.parametrize("case", STRATEGIES)
def test_simulated_ranks_find_what_flat_collectives_give(case: str) -> None:
    with simulated_ranks(8):
        levelled, flat = _axes(*STRATEGIES[case])
        for move in MOVES:
            for one, other in zip(_moved(levelled, move), _moved(flat, move), strict=True):
                expected = each_rank(other)
                for rank, tensor in each_rank(one).items():
                    assert torch.equal(tensor, expected[rank]), (move, rank)


def _on_a_rank(rank: int, world: int, cases: list[str]) -> None:
    for case in cases:
        levelled, flat = _axes(*STRATEGIES[case])
        for move in MOVES:
            for one, other in zip(_moved(levelled, move), _moved(flat, move), strict=True):
                assert torch.equal(one, other), (case, move)


def test_real_ranks_find_what_flat_collectives_give() -> None:
    run_ranks(_on_a_rank, 8, list(STRATEGIES))


def test_levels_that_differ_from_rank_to_rank_are_not_used() -> None:
    with simulated_ranks(6):
        mesh = Mesh.of(Strategy(axes={"shard": 6}))
        assert ProcessMesh.of(mesh, Cluster(4))["shard"].levels is None
        assert ProcessMesh.of(mesh, Cluster(6))["shard"].levels is None
    with simulated_ranks(12):
        # Of the groups 0–3, 4–7, 8–11 on nodes of 6 the second alone spans two.
        mesh = Mesh.of(Strategy(axes={"shard": 3, "tensor": 4}))
        assert ProcessMesh.of(mesh, Cluster(6))["tensor_x"].levels is None


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((8, 4, None), 1), ((8, 2, 4), 2), ((6, 3, None), 3), ((12, 2, 6), 1), ((4, 2, None), 2)],
)
def test_less_crosses_the_slow_level(shape: tuple[int, int, int | None], rows: int) -> None:
    """The figures in the module's table, counted from the calls that are made."""
    world, node, supernode = shape
    cluster = Cluster(node, supernode)
    outer, slow = (world // supernode, "supernode") if supernode else (world // node, "node")
    inner, chunk = world // outer, 8 * rows * world
    with simulated_ranks(world):
        levelled, flat = _axes(Strategy(axes={"shard": world}), "shard", cluster)

        def count(axis: Axis, move: Callable[[Axis, torch.Tensor], torch.Tensor], *x: int) -> list:  # type: ignore[type-arg]
            tensor = per_rank(_values(*x))
            with collectives.counting() as counted:
                move(axis, tensor)
            return counted

        small, large = (rows * world,), (world * rows * world,)
        for move, size, bytes_, messages, ring in (
            (Axis.reduce, large, 2 * (outer - 1) * chunk, 2 * (outer - 1), 2 * (world - 1) * chunk),
            (lambda a, x: a.gather(x, 0), small, (outer - 1) * chunk, outer - 1, (world - 1) * chunk),
            (lambda a, x: a.reduce_split(x, 0), large, (outer - 1) * chunk, outer - 1, (world - 1) * chunk),
        ):
            found = crossing(count(levelled, move, *size), cluster, slow)
            assert found.bytes == bytes_
            assert found.messages == messages
            ranked = crossing(count(flat, move, *size), cluster, slow)
            worst = crossing(count(flat, move, *size), cluster, slow, order="worst")
            assert ranked.bytes * inner == worst.bytes == ring
            assert found.bytes < ranked.bytes < worst.bytes or inner == 1
        swap = lambda a, x: a.swap(x, 0, 1)  # noqa: E731
        found = crossing(count(levelled, swap, world * rows, world), cluster, slow)
        direct = crossing(count(flat, swap, world * rows, world), cluster, slow)
        assert found == Crossing(direct.bytes, direct.messages / inner)


PLACEMENTS = {"flat": {}, "levelled": {"devices": {"node": 2}}, "launched": {"node": ["shard"]}}


def _all_trained(rank: int, world: int, lowering: str) -> dict[str, tuple]:  # type: ignore[type-arg]
    return {name: _trained(rank, world, lowering, placement) for name, placement in PLACEMENTS.items()}


def _trained(rank: int, world: int, lowering: str, placement: dict) -> tuple:  # type: ignore[type-arg]
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    from hyper_parallel import shard

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    strategy = Strategy.model_validate({"axes": {"shard": world}, "placement": placement, "check": False})
    shard.parallelize(model, strategy, lowering=lowering)  # type: ignore[arg-type]
    tokens = torch.arange(8).view(1, 8) + rank
    with collectives.counting() as counted:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
    handle = shard.sharded(model)
    gradients = {}
    for parameter in handle.parameters():
        assert parameter.grad is not None
        gradients[parameter.name] = handle.gather(parameter.grad, parameter.layout)
    dist.barrier()
    return gradients, crossing(counted, Cluster(2), "node")


@pytest.mark.parametrize("lowering", ["fsdp", "traceable"])
def test_a_model_trains_over_an_axis_that_spans_nodes(lowering: str) -> None:
    first = run_ranks(_all_trained, 4, lowering)[0]
    expected, flat = first["flat"]
    for gradients, crossed in (first["levelled"], first["launched"]):
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-7)
        # A chunk goes to one other node instead of around three ranks.
        assert crossed.bytes < 0.7 * float(flat.bytes)
