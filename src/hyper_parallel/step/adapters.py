"""Adapters of a run file (LoRA, arXiv 2106.09685): peft puts them into a model on the meta device."""

from __future__ import annotations

import torch
from torch import nn

from hyper_parallel.config.model import AdapterConfig
from hyper_parallel.errors import ConfigError, nearest
from hyper_parallel.shard.lora_adapters import adapted_layers, base_of, name_in_base


def with_adapters(model: nn.Module, declared: AdapterConfig) -> nn.Module:
    """The model with adapters, its other parameters frozen, on the meta device.

    Raises ConfigError where peft is not installed, and for a name that fits no layer, or one that is not linear.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ConfigError(
            "model.adapter needs the library peft; run: pip install hyper-parallel[lora]"
        ) from None
    linear = _linear_layers(model)
    targets = declared.targets if isinstance(declared.targets, str) else list(declared.targets)
    if not isinstance(targets, str):
        _check_targets(model, targets, linear)
    settings = LoraConfig(
        r=declared.rank,
        lora_alpha=declared.alpha or 2 * declared.rank,
        lora_dropout=declared.dropout,
        target_modules=targets,
        use_rslora=declared.rslora,
        use_dora=declared.dora,
    )
    try:
        with torch.device("meta"):
            found = get_peft_model(model, settings, autocast_adapter_dtype=False)
    except ValueError as error:
        raise ConfigError(f"model.adapter: {' '.join(str(error).split())[:300]}") from error
    assert isinstance(found, nn.Module)
    for name, layer in adapted_layers(found):
        place = name_in_base(name, found)
        if place not in linear:
            raise ConfigError(
                f"model.adapter.targets: {declared.targets} takes parameters of {place!r}, a "
                f"{type(base_of(layer)).__name__}, which is no linear layer; give some of {_ends(linear)}"
            )
    return found


def _linear_layers(model: nn.Module) -> set[str]:
    """Names of the layers that adapters are drawn for, GPT-2's transposed ones included."""
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        or any(
            kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")
            for kind in type(module).__mro__
        )
    }


def _check_targets(model: nn.Module, targets: list[str], linear: set[str]) -> None:
    """Raise ConfigError for the first name that no linear layer ends with; peft takes those that fit."""
    modules = dict(model.named_modules())
    for target in targets:
        fitting = [name for name in modules if name == target or name.endswith(f".{target}")]
        if not fitting:
            ends = {name.rpartition(".")[2] for name in linear}
            raise ConfigError(
                f"model.adapter.targets: no layer of {type(model).__name__} is named {target!r}"
                f"{nearest(target, ends)}; give all-linear or some of {_ends(linear)}"
            )
        if other := next((name for name in fitting if name not in linear), None):
            raise ConfigError(
                f"model.adapter.targets: {target!r} is no linear layer but {type(modules[other]).__name__}; "
                f"give all-linear or some of {_ends(linear)}"
            )


def _ends(linear: set[str]) -> str:
    """The last parts of the names."""
    return ", ".join(sorted({name.rpartition(".")[2] for name in linear if not name.endswith("lm_head")}))
