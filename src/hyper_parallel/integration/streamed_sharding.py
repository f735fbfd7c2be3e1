"""Streamed sharding: parallelizes a model that has values, rank 0's where ranks differ, without any device holding all.

The values stay where they are, on the host, while the model is spread without any. Then one tensor after the other
goes to the device, and each rank keeps its piece. Where only rank 0 has the values (`cpu_ram_efficient_loading` of
Transformers) it sends each tensor to the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.compat import fsdp
from hyper_parallel.compat.collectives import device_type
from hyper_parallel.compat.fsdp import move_hooks
from hyper_parallel.errors import IntegrationError
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
        piece = (
            value.to(device)
            if dist.get_rank() == 0
            else torch.empty(value.shape, dtype=value.dtype, device=device)
        )
        piece = piece.contiguous()
        dist.broadcast(piece, 0)
        yield name, piece


def _buffers_of_rank_0(model: nn.Module) -> None:
    """Buffers that are saved with a model are weights; others each rank has computed."""
    for owner in model.modules():
        for own, buffer in owner._buffers.items():
            if buffer is not None and own not in owner._non_persistent_buffers_set:
                dist.broadcast(buffer, 0)


# Broadcasts a model's values to all ranks before it is parallelized.
#
# A model that each process built for itself differs where values are drawn at random: new weights, new adapters. What
# differs is taken from rank 0, as DistributedDataParallel does; what is the same, which is all of a model that was
# loaded, does not travel. A sum over the bits of each tensor says whether it is the same.

log = logging.getLogger(__name__)

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element to the integers that have as many."""


@torch.no_grad()
def as_on_rank_0(model: nn.Module) -> None:
    """Give every rank the values of rank 0, where they differ; a collective.

    Raises IntegrationError for a model that has no values yet, or not the same parameters on every rank.
    """
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    empty = [name for name, tensor in named.items() if tensor.is_meta]
    if empty:
        raise IntegrationError(
            f"{empty[0]} has no values (it is on the meta device); load the model with from_pretrained first"
        )
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    device = device_type()
    shapes = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in named.items()]
    count = torch.tensor([len(shapes), -len(shapes)], device=device)
    dist.all_reduce(count, dist.ReduceOp.MAX)
    if int(count[0]) != -int(count[1]):
        raise IntegrationError(
            f"ranks built different models: one has {int(count[0])} tensors, another {-int(count[1])}; build the same "
            "model in every process"
        )
    sums = torch.tensor([_sum_of_bits(tensor) for tensor in named.values()], dtype=torch.int64, device=device)
    top, bottom = sums.clone(), sums.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX)
    dist.all_reduce(bottom, dist.ReduceOp.MIN)
    differ = (top != bottom).tolist()
    for tensor, differs in zip(named.values(), differ, strict=True):
        if differs:
            on_device = tensor.detach().to(device).contiguous()
            dist.broadcast(on_device, 0)
            tensor.copy_(on_device)
    if any(differ):
        log.info(
            "%d of %d tensors of the model differed between ranks and are rank 0's", sum(differ), len(differ)
        )


def _sum_of_bits(tensor: Tensor) -> int:
    flat = tensor.detach().contiguous().flatten()
    return int(flat.view(_BITS[flat.element_size()]).sum(dtype=torch.int64)) if flat.numel() else 0
