"""Accelerate's FSDP2 plugin as a Strategy, for LlamaFactory's main branch.

| The plugin | Ours |
|---|---|
| `mixed_precision_policy`: `param_dtype`, `reduce_dtype` | `precision.compute`, `reduce`, unless the arguments say |
| Accelerate's `mixed_precision` | parameters are kept in float32; without it in the dtype that the model has |
| `reshard_after_forward` | `memory.reshard_after_forward`, unless the arguments say |
| `activation_checkpointing` | `memory.recompute: layer`, in place of Accelerate's wrappers |
| `auto_wrap_policy` | nothing: a group of parameters is a layer |
| `cpu_offload`, `ignored_modules` | refused |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hyper_parallel.errors import IntegrationError
from hyper_parallel.integration.llamafactory.arguments import DTYPES
from hyper_parallel.strategy import Strategy

_WRAPPED = "_checkpoint_wrapped_module"


def with_plugin(strategy: Strategy, model: nn.Module, accelerator: Any, arguments: Any) -> Strategy:
    """The strategy, with what the plugin says beside it.

    Raises IntegrationError for what the plugin asks and a Strategy cannot say.
    """
    plugin = accelerator.state.fsdp_plugin
    if getattr(plugin, "cpu_offload", None) and type(plugin.cpu_offload).__name__ != "OffloadPolicy":
        raise IntegrationError(
            "FSDP's offloading of parameters (fsdp_offload_params) is not taken over; switch it off, and say what a "
            'step may hold: memory: {"device": …, "host": …} in hyper_parallel_args'
        )
    if getattr(plugin, "ignored_modules", None):
        raise IntegrationError(
            "FSDP's ignored_modules are not taken over: every parameter is spread; leave fsdp_ignored_modules out"
        )
    memory = strategy.memory
    if arguments.reshard_after_forward is None and memory.shard == "parameters" and _keeps(plugin):
        memory = memory.model_copy(update={"reshard_after_forward": False})
    if without_checkpoint_wrappers(model):
        memory = memory.model_copy(update={"recompute": "layer"})
    return strategy.model_copy(
        update={"memory": memory, "precision": _precision(strategy, model, accelerator, arguments)}
    )


def _keeps(plugin: Any) -> bool:
    # FSDP1's strategies are strings here; only FSDP2's False says that gathered parameters stay.
    return getattr(plugin, "reshard_after_forward", None) is False


def _precision(strategy: Strategy, model: nn.Module, accelerator: Any, arguments: Any) -> Any:
    mixed = str(getattr(accelerator, "mixed_precision", "no"))
    if mixed not in ("no", "bf16"):
        raise IntegrationError(f"mixed precision {mixed!r} is not supported; use bf16: true, or neither")
    policy = getattr(accelerator.state.fsdp_plugin, "mixed_precision_policy", None)
    kept = "float32" if mixed != "no" else _name(_dtype_of(model))
    compute = arguments.param_dtype or getattr(policy, "param_dtype", None) or kept
    reduce = arguments.reduce_dtype or getattr(policy, "reduce_dtype", None) or compute
    given = {"param": kept, "compute": _name(compute), "reduce": _name(reduce)}
    return strategy.precision.model_copy(update=given)


def _name(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        known = " and ".join(dict.fromkeys(DTYPES.values()))
        raise IntegrationError(f"parameters, arithmetic and gradients may be {known}; got {name}")
    return DTYPES[name]


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def without_checkpoint_wrappers(model: nn.Module) -> bool:
    """Take Accelerate's checkpoint wrappers out of the model; whether there were any."""
    found = [(name, module) for name, module in model.named_modules() if hasattr(module, _WRAPPED)]
    for name, wrapper in found:
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, getattr(wrapper, _WRAPPED))
    return bool(found)
