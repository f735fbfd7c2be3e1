"""A Llama that communicates much: tensor 2 · shard 2."""

from __future__ import annotations

import torch

import hyper_parallel as hp
from hyper_parallel.config.train import AdamWConfig, ScheduleConfig
from hyper_parallel.step.lr_schedule import schedule
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.step.recipe import Recipe


def recipe_of(layers: int) -> Recipe:
    """What trains it, on the meta device and on ranks of `fake_ranks(4, 0)`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=2048,
                hidden_size=2048,
                intermediate_size=4096,
                num_hidden_layers=layers,
                num_attention_heads=16,
                max_position_embeddings=4096,
            )
        )
    strategy = {"version": 1, "axes": {"shard": 2, "tensor": 2}, "sequence": True}
    hp.parallelize(model, hp.Strategy.model_validate(strategy), lowering="traceable")
    optimizer = build_optimizer(model, AdamWConfig(lr=1e-3))
    plan = schedule(ScheduleConfig(name="constant"), 10)
    return Recipe(model, hp.sharded(model), optimizer, plan, clip=1.0)
