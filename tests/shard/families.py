"""Small models of each family, and one step of them on one device or on a strategy."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from harness import families
from harness.equivalence import with_images
from hyper_parallel import shard
from hyper_parallel.compat.local_tensor import each_rank, on_rank, one_device, per_rank, simulated_ranks
from hyper_parallel.strategy import Strategy
from hyper_parallel.verify.step import inputs_of

# Those of the matrix, and two that drop attention weights.
FAMILIES: dict[str, dict[str, Any]] = {
    **families.FAMILIES,
    "llama-dropout": {**families.FAMILIES["llama-tied"], "attention_dropout": 0.1},
    "gpt2-dropout": {**families.FAMILIES["gpt2"], "attn_pdrop": 0.1},
}

STRATEGIES: dict[str, dict[str, Any]] = {
    "tensor 2": {"axes": {"tensor": 2}},
    "tensor 4 sequence": {"axes": {"tensor": 4}, "sequence": True},
    "shard 2": {"axes": {"shard": 2}},
    "shard 2 tensor 2": {"axes": {"shard": 2, "tensor": 2}},
    "replicate 2 shard 2": {"axes": {"replicate": 2, "shard": 2}},
    "replicate 2": {"axes": {"replicate": 2}},
    "tensor 2 shard 2 sequence": {"axes": {"tensor": 2, "shard": 2}, "sequence": True},
    "replicate 2 shard 2 tensor 2 sequence recompute": {
        "axes": {"replicate": 2, "shard": 2, "tensor": 2},
        "sequence": True,
        "memory": {"recompute": "layer"},
    },
}

ROWS, LENGTH = 8, 16


@dataclass
class Step:
    """What one step gave: whole tensors, by parameter name."""

    loss: float
    norm: float
    values: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]


def cells(
    families: Iterable[str],
    strategies: Iterable[str],
    sample: Collection[tuple[str, str]],
    refused: Collection[tuple[str, str]] = (),
) -> list:  # type: ignore[type-arg]
    """(family, strategy) of a whole matrix; those outside of the sample run with ``-m matrix`` only."""
    return [
        pytest.param(family, name, marks=[] if (family, name) in sample else [pytest.mark.matrix])
        for family, name in itertools.product(families, strategies)
        if (family, name) not in refused
    ]


def build(family: str, **overrides: Any) -> torch.nn.Module:
    """An unmodified model on the meta device."""
    fields = {**FAMILIES[family], **overrides}
    attention = fields.pop("attn_implementation", None)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    auto = AutoModelForImageTextToText if family in families.WITH_IMAGES else AutoModelForCausalLM
    with one_device(), torch.device("meta"):
        return auto.from_config(config, attn_implementation=attention).train()


def batch(images: bool = False) -> dict[str, torch.Tensor]:
    """Two packed documents a row; labels are shifted. With images: one in each row, of 4 × 8 patches."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 131, (ROWS, LENGTH), generator=generator)
    labels = ids.roll(-1, 1)
    labels[:, [5, LENGTH - 1]] = -100
    positions = torch.cat([torch.arange(6), torch.arange(LENGTH - 6)]).repeat(ROWS, 1)
    if not images:
        return {"input_ids": ids, "labels": labels, "position_ids": positions}
    return with_images(families.FAMILIES["qwen2.5-vl"], ids, labels, generator)


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor], tokens: int) -> torch.Tensor:
    output = model(**inputs_of({k: x for k, x in batch.items() if k != "labels"}), use_cache=False)
    return (
        torch.nn.functional.cross_entropy(
            output.logits.float().flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum"
        )
        / tokens
    )


def step(model: torch.nn.Module, strategy: Strategy, micro_batches: int = 1) -> Step:
    """One step on this rank, or on all simulated ones, of a model that was parallelized and has values."""
    handle = shard.sharded(model)
    mesh, shares = handle.mesh, strategy.axes.data
    with one_device():
        whole = batch(images=hasattr(model.config, "vision_config"))
    tokens = int((whole["labels"] != -100).sum())
    loss = torch.zeros(())
    for micro in range(micro_batches):

        def rows(rank: int, micro: int = micro) -> torch.Tensor:
            here = mesh.coordinate(rank)
            index = here["replicate"] * mesh.size("shard") + here["shard"]
            mine = torch.arange(ROWS).chunk(shares)[index]
            return mine.chunk(micro_batches)[micro]

        mine = {key: per_rank(lambda rank, x=x: x[rows(rank)]) for key, x in whole.items()}
        last = micro == micro_batches - 1
        with handle.micro_batch(seed=3, step=7, rows=per_rank(rows), last=last):
            part = loss_of(model, mine, tokens)
            part.backward()
        loss = loss + part.detach()
    loss = handle.all_reduce(loss, ("replicate", "shard"))
    norm = handle.grad_norm()
    parameters = handle.parameters()
    values = {p.name: handle.gather(p.local, p.layout) for p in parameters}
    gradients = {p.name: handle.gather(p.grad, p.layout) for p in parameters if p.grad is not None}
    first = {"values": values, "gradients": gradients}
    for kind, tensors in first.items():
        for name, tensor in tensors.items():
            with one_device():
                copies = list(each_rank(tensor).values())
                assert all(torch.equal(copies[0], copy) for copy in copies), (
                    f"{kind} of {name} differ between ranks"
                )
                tensors[name] = copies[0].clone()
    return Step(float(on_rank(loss, 0)), float(on_rank(norm, 0)), values, gradients)


def one_device_step(family: str, **strategy: Any) -> Step:
    model = build(family)
    alone = Strategy(**strategy)
    shard.parallelize(model, alone)
    shard.init_weights(model, seed=1)
    return step(model, alone)


def simulated_step(family: str, strategy: Strategy) -> Step:
    """All ranks in this process, `shard` lowered to traceable gathers."""
    with simulated_ranks(strategy.axes.world):
        model = build(family)
        shard.parallelize(model, strategy, lowering="traceable")
        shard.init_weights(model, seed=1)
        return step(model, strategy)
