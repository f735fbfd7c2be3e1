"""Streamed sharding: parallelizes a model with values without any device holding all of it.

The values stay where they are, on the host, while the model is spread without any. Then one tensor after the other
goes to the device, and each rank keeps its piece. Where only rank 0 has the values (`cpu_ram_efficient_loading` of
Transformers) it sends each tensor to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.compat import fsdp
from hyper_parallel.compat.parameter_hooks import move_hooks
from hyper_parallel.shard import ShardedModel, fill_weights, parallelize, sharded
from hyper_parallel.shard.parallelize import Lowering
from hyper_parallel.strategy import Strategy

Spread = TypeVar("Spread")


def parallelize_streamed(
    model: nn.Module,
    strategy: Strategy,
    device: torch.device,
    *,
    lowering: Lowering = "fsdp",
    from_rank_0: bool = False,
) -> ShardedModel:
    """Spread `model` in place, its pieces on `device`, as `hp.parallelize` does; a collective.

    `from_rank_0`: other ranks' values are not read. Raises StrategyError as `hp.parallelize` does.
    """
    taken = from_rank_0 and strategy.axes.world > 1
    streamed(model, lambda: parallelize(model, strategy, lowering=lowering), device, taken)
    return sharded(model)


def streamed(
    model: nn.Module, spread: Callable[[], Spread], device: torch.device, from_rank_0: bool = False
) -> Spread:
    """What `spread` returns, which spreads `model` while that has no values; its pieces are on `device` afterwards. A
    collective."""
    held = {name: parameter.detach() for name, parameter in model.named_parameters()}
    fsdp.replace_parameters(model, _without_values)
    found = spread()
    for owner in model.modules():
        for own, buffer in owner._buffers.items():
            if buffer is not None and not buffer.is_meta:
                owner._buffers[own] = buffer.to(device)
    fill_weights(model, _whole(held, device, from_rank_0), device)
    if from_rank_0:
        _buffers_of_rank_0(model)
    return found


def _without_values(parameter: nn.Parameter) -> nn.Parameter:
    empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    move_hooks(parameter, empty)
    return empty


def _whole(held: dict[str, Tensor], device: torch.device, from_rank_0: bool) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor on the device) one at a time; what was held is let go of as it is used."""
    for name in list(held):
        value = held.pop(name)
        if not from_rank_0:
            yield name, value.to(device)
            continue
        told = (
            value.to(device)
            if dist.get_rank() == 0
            else torch.empty(value.shape, dtype=value.dtype, device=device)
        )
        told = told.contiguous()
        dist.broadcast(told, 0)
        yield name, told


def _buffers_of_rank_0(model: nn.Module) -> None:
    """Buffers that are saved with a model are weights; others each rank has computed."""
    for owner in model.modules():
        for own, buffer in owner._buffers.items():
            if buffer is not None and own not in owner._non_persistent_buffers_set:
                dist.broadcast(buffer, 0)
