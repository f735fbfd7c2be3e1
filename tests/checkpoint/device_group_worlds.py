"""Runs whose tensors live in some device groups only, such as the stages of a pipeline: a thread a rank."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoint_worlds import ThreadRanks, each_rank, local_at, raised, random_tensor, same_bits
from safetensors import safe_open

from hyper_parallel.checkpoint import Piece, Writer, read
from hyper_parallel.layout import DeviceGroup, Layout, Mesh
from hyper_parallel.strategy import Strategy

Groups = tuple[DeviceGroup, ...]

WORLDS: dict[str, Groups] = {
    "1 group": (DeviceGroup.of_all_ranks(Mesh(("shard", 2), ("tensor_x", 2))),),
    "2 groups of 2": DeviceGroup.of_pipeline(Strategy(axes={"pipeline": 2, "shard": 2})),
    "2 groups, interleaved": DeviceGroup.of_pipeline(Strategy(axes={"replicate": 2, "pipeline": 2})),
    "4 groups of 1": DeviceGroup.of_pipeline(Strategy(axes={"pipeline": 4})),
    "2 groups of shard 2, tensor 2": DeviceGroup.of_pipeline(
        Strategy(axes={"pipeline": 2, "shard": 2, "tensor": 2})
    ),
    "unequal groups": (
        DeviceGroup(Mesh(("shard", 3)), (4, 1, 2), "three"),
        DeviceGroup(Mesh(("shard", 1), ("tensor_x", 1)), (0,), "one"),
        DeviceGroup(Mesh(("shard", 3)), (5, 7, 6), "three more"),
    ),
}
"""Rank 3 of the last is in no group."""


@dataclass(frozen=True)
class Saved:
    """A global tensor, its layout in each of the groups that hold it, and these groups."""

    whole: torch.Tensor
    layout: Layout
    owners: Groups

    def piece(self, rank: int, empty: bool = False) -> Piece | None:
        """What a rank of the run holds, None if it holds nothing."""
        group = next((group for group in self.owners if rank in group.ranks), None)
        if group is None:
            return None
        local = local_at(self.whole, self.layout, group.coordinate(rank))
        # In another order on each rank: the order means nothing.
        turn = rank % len(self.owners)
        owners = (*self.owners[turn:], *self.owners[:turn])
        return Piece(torch.zeros_like(local) if empty else local, self.layout, owners)


Tensors = dict[str, Saved]


def world_of(groups: Groups) -> int:
    return max(rank for group in groups for rank in group.ranks) + 1


def model_on(groups: Groups, layers: int = 5) -> Tensors:
    """A model of layers whose stages are `groups`: a tied embedding, uneven shards, fused parts, buffers, scalars."""

    def saved(
        shape: tuple[int, ...], dtype: torch.dtype, seed: int, split: dict[str, int], *owners: DeviceGroup
    ):
        layout = Layout.replicated(owners[0].mesh, shape)
        for axis, dim in split.items():
            parts = (4, 2, 1) if axis == "tensor_x" and shape[dim] == 7 else None
            if owners[0].mesh.size(axis) > 1:
                layout = layout.split(dim, axis, None if layout.dims[dim] else parts)
        return Saved(random_tensor(shape, dtype, seed), layout, owners)

    first, last = groups[0], groups[-1]
    ends = (first,) if first is last else (first, last)
    tensors = {
        "model.embed": saved((23, 6), torch.float32, 0, {"shard": 0}, *ends),
        "optimizer.exp_avg.model.embed": saved((23, 6), torch.float64, 1, {"shard": 0}, *ends),
        "model.norm": saved((5,), torch.float32, 2, {"shard": 0}, last),
        "model.scale": saved((), torch.bfloat16, 3, {}, last),
        "model.empty": saved((0, 3), torch.float32, 4, {"shard": 1}, first),
    }
    for layer in range(layers):
        group = groups[layer * len(groups) // layers]
        tensors[f"model.{layer}.qkv"] = saved(
            (7, 3), torch.bfloat16, 10 + layer, {"tensor_x": 0, "shard": 0}, group
        )
        tensors[f"model.{layer}.out"] = saved(
            (9, 31), torch.float32, 20 + layer, {"shard": 0, "tensor_x": 1}, group
        )
    # Every group holds the buffers and the count; layouts are of one mesh.
    alike = tuple(group for group in groups if group.mesh == first.mesh)
    tensors["model.rotary"] = saved((11,), torch.float32, 5, {}, *alike)
    tensors["optimizer.step"] = saved((), torch.int64, 6, {}, *alike)
    return tensors


def pieces(tensors: Tensors, rank: int, empty: bool = False) -> dict[str, Piece]:
    found = {name: saved.piece(rank, empty) for name, saved in tensors.items()}
    return {name: piece for name, piece in found.items() if piece is not None}


def save_tensors(folder: Path, tensors: Tensors, world: int, step: int = 1, **options: Any) -> Path:
    """Every rank of the run saves; the committed path, which is the same on every rank."""
    state = {"step": step, "model_config": {"model_type": "x"}}

    def one(ranks: ThreadRanks) -> Path | None:
        with Writer(folder, world, ranks.rank, group=ranks, **options) as writer:
            writer.save(step, pieces(tensors, ranks.rank), state)
            return writer.wait()

    (path,) = set(raised(each_rank(world, one)))
    return path


def check_read(path: Path, tensors: Tensors, ranks: Collection[int]) -> None:
    """Each rank reads the checkpoint and gets exactly its part of each of its tensors, bit for bit."""
    for rank in ranks:
        got = pieces(tensors, rank, empty=True)
        read(path, got, rank=rank, elsewhere=tensors.keys() - got.keys())
        wanted = pieces(tensors, rank)
        assert got.keys() == wanted.keys()
        for name, want in wanted.items():
            assert same_bits(got[name].local, want.local), f"{name} on rank {rank}"


def check_written_once(path: Path, tensors: Tensors) -> dict[str, int]:
    """The files hold the right values, each element once, and no byte more; the bytes of each file's tensors."""
    seen = {name: torch.zeros(saved.whole.shape, dtype=torch.int64) for name, saved in tensors.items()}
    sizes = {}
    for file in sorted(path.glob("*.safetensors")):
        sizes[file.name] = 0
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - it is not a dict
                name, text = re.fullmatch(r"(.*)\[(.*)\]", key).groups()
                slices = tuple(slice(*map(int, part.split(":"))) for part in text.split(", ") if part)
                block = opened.get_tensor(key)
                assert same_bits(block, tensors[name].whole[slices]), key
                seen[name][slices] += 1
                sizes[file.name] += block.numel() * block.element_size()
        header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        assert file.stat().st_size == header + sizes[file.name]
    for name, count in seen.items():
        assert count.eq(1).all(), name
    return sizes
