"""Places of experts as tensors, so that one graph serves every placement.

| tensor | what |
|---|---|
| `keys`, int64[E] | expert to the key by which its rows are sorted: its place p < E, or E + j for the replica j |
| `replicas`, int64[K] | the place of each expert that has a replica |

Rank r of the expert axis owns the places r · E/n to (r + 1) · E/n. Where experts are placed by their loads, the tensors
are buffers of the experts module, written between steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from hyper_parallel.compat.local_tensor import each_rank, one_device, per_rank
from hyper_parallel.compat.paged_out_parameters import present
from hyper_parallel.shard.experts.placement import Placement

_KEYS, _REPLICAS = "expert_keys", "expert_replica_places"


class Places(NamedTuple):
    """Where each expert's rows are computed."""

    keys: torch.Tensor
    replicas: torch.Tensor

    @classmethod
    def fixed(cls, experts: int, replicas: tuple[int, ...], device: torch.device) -> Places | None:
        """Experts in the model's order, of which these have replicas; None where none has, and no table is needed."""
        if not replicas:
            return None
        keys = torch.arange(experts, device=device)
        for at, expert in enumerate(replicas):
            keys[expert] = experts + at
        return cls(keys, torch.tensor(replicas, dtype=torch.int64, device=device))

    @classmethod
    def of(cls, module: nn.Module) -> Places:
        """Those that `add_places` gave a module."""
        keys, replicas = module._buffers[_KEYS], module._buffers[_REPLICAS]
        assert keys is not None
        assert replicas is not None
        return cls(keys, replicas)


def add_places(module: nn.Module, experts: int, replicas: int, device: torch.device) -> None:
    """Give an experts module the buffers, for the model's own order of experts; not part of its state dict."""

    def zeros(length: int) -> torch.Tensor:
        return per_rank(lambda _: torch.zeros(length, dtype=torch.int64, device=device))

    module.register_buffer(_KEYS, zeros(experts), persistent=False)
    module.register_buffer(_REPLICAS, zeros(replicas), persistent=False)
    if device.type != "meta":
        set_places(module, Placement.initial(experts, replicas))


def set_places(module: nn.Module, placement: Placement) -> None:
    """Write a placement into a module's buffers."""
    experts = len(placement.order)
    place_of = {expert: place for place, expert in enumerate(placement.order)}
    keys = [place_of[expert] for expert in range(experts)]
    for at, expert in enumerate(placement.replicas):
        keys[expert] = experts + at
    values = (keys, [place_of[expert] for expert in placement.replicas])
    for buffer, numbers in zip(Places.of(module), values, strict=True):
        with present(buffer, changed=True), one_device():
            for local in each_rank(buffer).values():
                local.copy_(torch.tensor(numbers, dtype=torch.int64))
