"""Attention spread over simulated ranks, beside the same attention on one device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hyper_parallel.compat.local_tensor import on_rank, one_device, per_rank, simulated_ranks
from hyper_parallel.layout.mesh import DeviceGroup, Fold, Mesh
from hyper_parallel.shard.context.attention import attention, give_axes
from hyper_parallel.shard.context.mask import ContextMask, Positions
from hyper_parallel.shard.context.plan import PositionSplit
from hyper_parallel.shard.mesh_axis import Axis
from hyper_parallel.shard.process_mesh import ProcessMesh


@dataclass(frozen=True)
class Case:
    """What is attended with. `documents` are the lengths of the documents of each row."""

    heads: int = 4
    pairs: int = 2
    length: int = 48
    size: int = 6
    value_size: int = 6
    window: int | None = None
    documents: tuple[tuple[int, ...], ...] | None = None
    sinks: bool = False
    softcap: float | None = None

    def tensors(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        made = {
            "q": draw(2, self.heads, self.length, self.size),
            "k": draw(2, self.pairs, self.length, self.size),
            "v": draw(2, self.pairs, self.length, self.value_size),
            "gradient": draw(2, self.length, self.heads, self.value_size),
        }
        return made | ({"sinks": draw(self.heads)} if self.sinks else {})

    def document_ids(self) -> Tensor | None:
        if self.documents is None:
            return None
        rows = [
            torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
            for lengths in self.documents
        ]
        return torch.stack(rows)


def expected(case: Case) -> dict[str, Tensor]:
    """The output and the gradients on one device, written down from the definition."""
    given = {name: x.clone().requires_grad_(name != "gradient") for name, x in case.tensors().items()}
    groups = case.heads // case.pairs
    k, v = given["k"].repeat_interleave(groups, 1), given["v"].repeat_interleave(groups, 1)
    scores = given["q"] @ k.transpose(-1, -2) * 0.3
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    at = torch.arange(case.length)
    seen = (at[None, :] <= at[:, None])[None]
    if case.window is not None:
        seen = seen & (at[None, :] > at[:, None] - case.window)
    ids = case.document_ids()
    if ids is not None:
        seen = seen & (ids[:, :, None] == ids[:, None, :])
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if case.sinks:
        extra = given["sinks"].view(1, -1, 1, 1).expand(2, -1, case.length, 1)
        weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    out = (weights @ v).transpose(1, 2)
    out.backward(given["gradient"])
    return _answer(out, given)


def spread(case: Case, ring: int, ulysses: int) -> list[dict[str, Tensor]]:
    """The same over this process's rank, or over every simulated one: local tensors by rank, `positions` with them."""
    mesh = mesh_of(ring, ulysses)
    axes = ProcessMesh.of(mesh)
    context, rings, inner = (axes[name] for name in ("context", "rings", "inner"))
    split = PositionSplit(context, ulysses)
    given = {}
    with one_device():
        whole = case.tensors()
        ids = case.document_ids()
    for name, x in whole.items():
        dim = {"gradient": 1, "sinks": None}.get(name, 2)

        def mine(rank: int, x: Tensor = x, dim: int | None = dim) -> Tensor:
            return (
                x.clone()
                if dim is None
                else x.index_select(dim, split.positions(case.length, context.index(rank)))
            )

        given[name] = per_rank(mine).requires_grad_(name != "gradient")
    documents = None if ids is None else (ids, ids)
    if ids is not None:
        shared = per_rank(lambda rank: ids.clone())
        documents = (shared, shared)
    position_ids = per_rank(lambda rank: torch.arange(case.length).unsqueeze(0))
    module = nn.Module()
    give_axes(module, rings, inner)
    out, _ = attention(
        module,
        given["q"],
        given["k"],
        given["v"],
        ContextMask(
            Positions(split, rings.index, position_ids, documents), case.window, documents is not None
        ),
        scaling=0.3,
        softcap=case.softcap,
        s_aux=given.get("sinks"),
    )
    out.backward(given["gradient"])
    return _answer(out, given)  # type: ignore[return-value]


def mesh_of(ring: int, ulysses: int) -> Mesh:
    over = ("context",)
    return Mesh(
        ("context", ring * ulysses), folds={"rings": Fold(over, ring, ulysses), "inner": Fold(over, ulysses)}
    )


def _answer(out: Tensor, given: dict[str, Tensor]) -> dict[str, Tensor]:
    grads = {f"d{name}": x.grad for name, x in given.items() if name != "gradient"}
    return {"out": out.detach(), **grads}  # type: ignore[dict-item]


def simulated(case: Case, ring: int, ulysses: int) -> dict[str, Tensor]:
    """What all simulated ranks give, put together in order of position."""
    world = ring * ulysses
    with simulated_ranks(world):
        answer = spread(case, ring, ulysses)
        with one_device():
            by_rank = [
                {name: on_rank(x, rank).clone() for name, x in answer.items()} for rank in range(world)
            ]
    return together(case, ring, ulysses, by_rank)


def together(case: Case, ring: int, ulysses: int, by_rank: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The ranks' local tensors in order of position; gradients of sinks summed."""
    split = PositionSplit(Axis("context", DeviceGroup.of_all_ranks(mesh_of(ring, ulysses)), ""), ulysses)
    order = torch.cat([split.positions(case.length, index) for index in range(ring * ulysses)])
    back = torch.argsort(order)
    whole = {}
    for name in by_rank[0]:
        parts = [answer[name] for answer in by_rank]
        if name == "dsinks":
            whole[name] = torch.stack(parts).sum(0)
        else:
            dim = 1 if name == "out" else 2
            whole[name] = torch.cat(parts, dim).index_select(dim, back)
    return whole
