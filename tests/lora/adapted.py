"""Small models of each family with LoRA adapters, and one step of them."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from hyper_parallel import shard
from hyper_parallel.compat.local_tensor import one_device, simulated_ranks
from hyper_parallel.strategy import Strategy
from shard.families import Step, build, step

# Every linear map of the decoder's attentions and MLPs, and not of a vision tower.
ATTENTION = (
    r"(?!.*visual).*attn\.([qkvo]_proj|qkv_proj|q_[ab]_proj|kv_a_proj_with_mqa|kv_b_proj|c_attn|c_proj)"
)
MLP = r"(?!.*visual).*mlp\.(gate_proj|up_proj|gate_up_proj|down_proj|c_fc|c_proj)"


def adapt(model: torch.nn.Module, **settings: Any) -> torch.nn.Module:
    """The model with adapters. B is drawn like A instead of zeros, so that every gradient says something."""
    experts = any(name.endswith(".experts") for name, _ in model.named_modules())
    fields = {
        "r": 3,
        "lora_alpha": 1,
        "init_lora_weights": False,
        # Where there are experts, peft takes the names of an MLP's projections for parameters of the experts.
        "target_modules": ATTENTION if experts else f"{ATTENTION}|{MLP}",
        "fan_in_fan_out": model.config.model_type == "gpt2",
        **settings,
    }
    with one_device():
        return get_peft_model(model, LoraConfig(**fields)).train()


def one_device_step(family: str, **settings: Any) -> Step:
    model = adapt(build(family), **settings)
    shard.parallelize(model, Strategy())
    shard.init_weights(model, seed=1)
    return step(model, Strategy())


def simulated_step(family: str, strategy: Strategy, **settings: Any) -> Step:
    with simulated_ranks(strategy.axes.world):
        model = adapt(build(family), **settings)
        shard.parallelize(model, strategy, lowering="traceable")
        shard.init_weights(model, seed=1)
        return step(model, strategy)
