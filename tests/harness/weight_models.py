"""Small models of an actor and of a rollout, and a process's end of a weight transfer between them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hyper_parallel.config.rl_roles import WeightsConfig
from hyper_parallel.rl.weights.description import Description
from hyper_parallel.rl.weights.plan import plan_weights
from hyper_parallel.rl.weights.transfer import Meeting, WeightTransfer, connect, describe, local_tensors
from hyper_parallel.shard import parallelize
from hyper_parallel.shard.sharded_model import is_sharded, sharded
from hyper_parallel.strategy import Strategy

ROLES = ("actor", "rollout")


def small_model(
    seed: int, axes: Mapping[str, int] | None = None, dtype: torch.dtype = torch.float32, **changed: Any
) -> nn.Module:
    """A Llama of two layers with tied embeddings, parallelized unless `axes` is None."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 30,
        "tie_word_embeddings": True,
        **changed,
    }
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**shape)).to(dtype)
    return model if axes is None else parallelize(model, Strategy(axes=axes))


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole parameters of a model, by name; a collective of its group."""
    if not is_sharded(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}
    handle = sharded(model)
    return {p.name: handle.gather(p.local.contiguous(), p.layout).clone() for p in handle.parameters()}


def both_descriptions(port: int, own: Description, epoch: int) -> tuple[Description, Description]:
    """The descriptions of actor and rollout, which rank 0 of each leaves in the store: a controller's work."""
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=30))
    store.set(f"description/{epoch}/{own.role}", json.dumps(own.to_json()))
    found = [Description.from_json(json.loads(store.get(f"description/{epoch}/{role}"))) for role in ROLES]
    return found[0], found[1]


def connected(
    model: nn.Module,
    role: str,
    rank: int,
    world: int,
    port: int,
    *,
    epoch: int = 0,
    options: WeightsConfig | None = None,
    seconds: float = 20.0,
) -> WeightTransfer:
    """A rank's end of the transfer from actor to rollout."""
    plan = plan_weights(*both_descriptions(port, describe(model, role, world), epoch), options)
    meeting = Meeting(host="127.0.0.1", port=port, epoch=epoch)
    if role == "actor":
        return connect(plan, rank, meeting, source=lambda: local_tensors(model), seconds=seconds)
    return connect(
        plan, plan.target_rank(rank), meeting, target=lambda: local_tensors(model), seconds=seconds
    )
