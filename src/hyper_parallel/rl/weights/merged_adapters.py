"""Weights that an actor with LoRA adapters gives to others: merged, under the names of the model without adapters.

    W' = W + s B A        arXiv 2106.09685, section 4.1; the formula, and on a CPU the bits, of `export`

W stays in its pieces: B A, [out, in], is computed on every rank from the small factors and cut as W is. DoRA divides by
norms of whole rows, so that its layers are gathered first, one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hyper_parallel.checkpoint.adapters import MAGNITUDE, merge_state, merged_weight
from hyper_parallel.rl.weights.transfer import local_tensors
from hyper_parallel.shard.lora_adapters import adapted_layers, name_in_base
from hyper_parallel.shard.sharded_model import sharded


def has_adapters(model: nn.Module) -> bool:
    """Whether a model has layers with adapters."""
    return next(adapted_layers(model), None) is not None


@torch.no_grad()
def sent_tensors(model: nn.Module) -> Mapping[str, Tensor]:
    """This rank's part of each weight that is sent, by its name in the description.

    `local_tensors` for a model without adapters. With them the adapted weights are copies, and it is a collective.
    """
    local = local_tensors(model)
    state = merge_state(model)
    if state is None:
        assert not has_adapters(model), "adapters of a run file are one of LoRA or DoRA for each layer"
        return local
    handle = sharded(model)
    layouts = {p.name: p.layout for p in handle.owned()}
    found = {name_in_base(name, model): tensor for name, tensor in local.items()}
    sent = {name: tensor for name, tensor in found.items() if name is not None}

    def whole(name: str) -> Tensor:
        return handle.gather(local[name], layouts[name])

    for layer, scale in state["scales"].items():
        name, across = f"{layer}.base_layer.weight", layer in state["transposed"]
        a, b = (whole(f"{layer}.lora_{factor}.default.weight").float() for factor in "AB")
        change = (b @ a) * scale
        change = change.mT if across else change
        magnitude = f"{layer}{MAGNITUDE}default.weight"
        if magnitude in local:
            merged = handle.cut(
                merged_weight(whole(name), change, whole(magnitude), across=across), layouts[name]
            )
        else:
            merged = merged_weight(local[name], handle.cut(change, layouts[name]))
        plain = name_in_base(name, model)
        assert plain is not None, "a weight of the base"
        sent[plain] = merged
    return sent
