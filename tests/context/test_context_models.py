"""Unmodified models under context parallelism, alone and in products, against one device."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaModel

from harness import run_ranks
from harness.families import FAMILIES, SHAPE
from hyper_parallel import shard
from hyper_parallel.compat.local_tensor import each_rank, one_device, per_rank, simulated_ranks
from hyper_parallel.shard.loss import causal_lm_loss
from hyper_parallel.strategy import Strategy

ROWS, LENGTH = 2, 24

SPLITS: dict[str, dict[str, Any]] = {
    "ring 2": {"axes": {"context": 2}, "context": {"method": "ring"}},
    "ring 4": {"axes": {"context": 4}, "context": {"method": "ring"}},
    "ulysses 2": {"axes": {"context": 2}},
    "ulysses 4": {"axes": {"context": 4}, "context": {"method": "ulysses"}},
    "hybrid 2 x 2": {"axes": {"context": 4}, "context": {"method": "hybrid", "ulysses": 2}},
    "tensor 2 sequence": {"axes": {"context": 2, "tensor": 2}, "sequence": True},
    "shard 2 recompute": {"axes": {"shard": 2, "context": 2}, "memory": {"recompute": "layer"}},
}

SAMPLE = {
    ("llama", "shard 2 recompute"),
    ("mistral", "ring 4"),
    ("gemma2", "ring 2"),
    ("gemma3", "hybrid 2 x 2"),
    ("gpt-oss", "ulysses 4"),
    ("gpt-oss", "ring 2"),
    ("deepseek-v3", "ring 2"),
    ("gpt2", "tensor 2 sequence"),
    ("phi3", "ulysses 2"),
}
TOLERANCE = 5e-7
"""A few units in the last place of fp32 on gradients of size 0.1."""


def build(family: str, **changes: Any) -> torch.nn.Module:
    fields = {**FAMILIES[family], **changes}
    attention = fields.pop("attn_implementation", "sdpa")
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with one_device(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 126, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(11), torch.arange(LENGTH - 11)]).repeat(ROWS, 1)
    labels = ids.roll(-1, 1)
    labels[:, [10, LENGTH - 1]] = -100
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def gradients(model: torch.nn.Module, by_chunk: bool) -> dict[str, Tensor]:
    """The loss's part of this rank, summed, and whole gradients; of every rank, which must agree."""
    handle = shard.sharded(model)
    data = handle.strategy.axes.shard
    with one_device():
        whole = batch()
    tokens = int((whole["labels"] != -100).sum())

    def rows(rank: int) -> Tensor:
        return torch.arange(ROWS).chunk(data)[handle.data_index_of(rank)]

    mine = {key: per_rank(lambda rank, x=x: x[rows(rank)]) for key, x in whole.items()}
    labels = mine.pop("labels")
    with handle.micro_batch(seed=3, step=7, rows=per_rank(rows)):
        if by_chunk:
            loss = causal_lm_loss(model, mine["input_ids"], labels, mine["position_ids"], tokens)
            axes: tuple[str, ...] = ("shard", "context")
        else:
            # Logits are whole on every rank, and so is the loss.
            logits = model(**mine, use_cache=False).logits
            total = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), labels.flatten(), reduction="sum"
            )
            loss, axes = total / tokens, ("shard",)
        loss.backward()
    found = {p.name: handle.gather(p.grad, p.layout) for p in handle.parameters() if p.grad is not None}
    found["loss"] = handle.all_reduce(loss.detach(), axes)
    for name, x in found.items():
        with one_device():
            first, *others = each_rank(x).values()
            assert all(torch.equal(first, other) for other in others), f"{name} differs between ranks"
            found[name] = first.clone()
    return found


def run(family: str, strategy: Strategy, lowering: str, by_chunk: bool) -> dict[str, Tensor]:
    model = build(family)
    shard.parallelize(model, strategy, lowering=lowering)  # type: ignore[arg-type]
    shard.init_weights(model, seed=1)
    return gradients(model, by_chunk)


@functools.cache
def expected(family: str) -> dict[str, Tensor]:
    # A plain call of GPT-OSS mixes packed documents: it does not hand positions on to its masks.
    return run(family, Strategy(), "traceable", family == "gpt-oss")


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, x in wanted.items():
        atol = 2e-6 if name == "loss" else TOLERANCE
        torch.testing.assert_close(got[name], x, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("family", "split"),
    [
        pytest.param(f, s, marks=[] if (f, s) in SAMPLE else [pytest.mark.matrix])
        for f in FAMILIES
        if f != "qwen2.5-vl"
        for s in SPLITS
    ],
)
def test_simulated_ranks_compute_what_one_device_computes(family: str, split: str) -> None:
    strategy = Strategy(**SPLITS[split])
    by_chunk = family not in ("gemma2", "phi3")  # these two by a plain call, whose logits are whole
    with simulated_ranks(strategy.axes.world):
        got = run(family, strategy, "traceable", by_chunk)
    assert_same(got, expected(family))


def _rank(rank: int, world: int, family: str, split: str) -> dict[str, Tensor]:
    return run(family, Strategy(**SPLITS[split], check=False), "fsdp", True)


@pytest.mark.parametrize(
    ("family", "split"),
    [
        ("mistral", "ring 4"),
        ("gpt-oss", "hybrid 2 x 2"),
        ("llama", "shard 2 recompute"),
        ("gemma2", "ring 2"),
    ],
)
def test_workers_compute_what_one_device_computes(family: str, split: str) -> None:
    for got in run_ranks(_rank, Strategy(**SPLITS[split]).axes.world, family, split):
        assert_same(got, expected(family))


# A plain call means what it means on one device.


def filled(model: torch.nn.Module, strategy: Strategy) -> torch.nn.Module:
    shard.parallelize(model, strategy, lowering="traceable")
    shard.init_weights(model, seed=1)
    return model


def call(strategy: Strategy, inputs: dict[str, Tensor], **changes: Any) -> dict[str, Tensor]:
    """The tensors of a model's output and the gradient of its embedding, from a call with labels."""
    model = filled(build("llama", **changes), strategy)
    handle = shard.sharded(model)
    mine = {key: per_rank(lambda rank, x=x: x) for key, x in inputs.items()}
    output = model(**mine, use_cache=False)
    output.loss.backward()
    embedding = next(p for p in handle.parameters() if "embed" in p.name)
    assert embedding.grad is not None
    found = {
        "loss": output.loss,
        "logits": output.logits,
        "embedding": handle.gather(embedding.grad, embedding.layout),
    }
    with one_device():
        return {name: next(iter(each_rank(x.detach()).values())).clone() for name, x in found.items()}


@pytest.mark.parametrize("kind", ["nothing else", "padding", "no positions", "rope by length"])
@pytest.mark.parametrize("split", ["ring 2", "ulysses 2"])
def test_a_call_with_labels_gives_the_whole_loss_and_logits(split: str, kind: str) -> None:
    inputs = batch()
    inputs["labels"] = inputs["input_ids"].clone()
    changes: dict[str, Any] = {}
    if kind in ("padding", "no positions"):
        del inputs["position_ids"]
    if kind == "padding":
        mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
        mask[1, 17:] = 0
        inputs["attention_mask"] = mask
        inputs["labels"][1, 17:] = -100
    if kind == "rope by length":
        inputs["position_ids"] = torch.arange(LENGTH).repeat(ROWS, 1)
        changes["rope_parameters"] = {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [3.0] * 4,
            "original_max_position_embeddings": 20,
        }
    wanted = call(Strategy(), inputs, **changes)
    strategy = Strategy(**SPLITS[split])
    with simulated_ranks(strategy.axes.world):
        got = call(strategy, inputs, **changes)
    for name, x in wanted.items():
        torch.testing.assert_close(got[name], x, rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_embeddings_may_be_given_and_get_their_part_of_the_gradient() -> None:
    def gradient(strategy: Strategy) -> list[Tensor]:
        model = filled(build("llama"), strategy)
        with one_device():
            whole = torch.randn(
                ROWS, LENGTH, SHAPE["hidden_size"], generator=torch.Generator().manual_seed(2)
            )
        given = per_rank(lambda rank: whole.clone()).requires_grad_()
        logits = model(inputs_embeds=given).logits
        logits.square().sum().backward()
        with one_device():
            return [x.clone() for x in each_rank(given.grad).values()]  # type: ignore[arg-type]

    (wanted,) = gradient(Strategy())
    with simulated_ranks(2):
        parts = gradient(Strategy(**SPLITS["ring 2"]))
    torch.testing.assert_close(sum(parts), wanted, rtol=0, atol=2e-6)
    assert all(not part.any(-1).all() for part in parts)


def test_a_model_without_a_head_gives_whole_hidden_states() -> None:
    def hidden(strategy: Strategy) -> Tensor:
        config = AutoConfig.for_model("llama", **SHAPE)
        with one_device(), torch.device("meta"):
            model = LlamaModel(config)
        filled(model, strategy)
        ids = per_rank(lambda rank: batch()["input_ids"])
        x = model(input_ids=ids).last_hidden_state
        with one_device():
            return next(iter(each_rank(x.detach()).values())).clone()

    wanted = hidden(Strategy())
    with simulated_ranks(2):
        got = hidden(Strategy(**SPLITS["ring 2"]))
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-6)
