"""A small model with values, spread over the ranks of a test, and steps of it on rows that are always the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from hyper_parallel.shard import ShardedModel, parallelize, sharded
from hyper_parallel.shard.loss import causal_lm_loss
from hyper_parallel.shard.process_mesh import LOSS_AXES
from hyper_parallel.strategy import Strategy

ROWS, LENGTH, VOCABULARY = 4, 8, 67
"""The vocabulary is odd, so that two ranks hold parts of different lengths."""


def tiny(*, tied: bool = False, experts: bool = False) -> Any:
    """A decoder of two layers, always with the same values."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if experts:
        return MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=4, num_experts_per_tok=2))
    return LlamaForCausalLM(LlamaConfig(**shape))


def spread(declared: dict[str, Any], model: Any = None) -> ShardedModel:
    """The handle of `tiny()`, or of the model given, spread as declared."""
    model = tiny() if model is None else model
    return sharded(parallelize(model.train(), Strategy(**declared)))


def backward(handle: ShardedModel, step: int, micro_batches: int = 1) -> float:
    """Gradients of one step's rows; the mean loss of its tokens, the same on every rank."""
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    mine = torch.arange(ROWS).chunk(handle.strategy.axes.data)[handle.data_index]
    tokens = float((labels != -100).sum())
    total = torch.zeros(())
    for index, rows in enumerate(mine.chunk(micro_batches)):
        with handle.micro_batch(seed=1, step=step, rows=rows, last=index == micro_batches - 1):
            loss = causal_lm_loss(handle.model, ids[rows], labels[rows], None, tokens)
            loss.backward()
        total += loss.detach()
    return float(handle.all_reduce(total, LOSS_AXES))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups as Trainer makes them: matrices are decayed, norms are not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]


def whole(handle: ShardedModel) -> dict[str, torch.Tensor]:
    """Every parameter, gathered. A collective."""
    return {p.name: handle.gather(p.local, p.layout).clone() for p in handle.parameters()}
