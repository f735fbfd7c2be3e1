"""Broadcasts a model's values to all ranks before it is parallelized.

A model that each process built for itself differs where values are drawn at random: new weights, new adapters. What
differs is taken from rank 0, as DistributedDataParallel does; what is the same, which is all of a model that was
loaded, does not travel. Whether it is the same is told by a sum over the bits of each tensor.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.compat.collectives import device_type
from hyper_parallel.errors import IntegrationError

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
            told = tensor.detach().to(device).contiguous()
            dist.broadcast(told, 0)
            tensor.copy_(told)
    if any(differ):
        log.info(
            "%d of %d tensors of the model differed between ranks and are rank 0's", sum(differ), len(differ)
        )


def _sum_of_bits(tensor: Tensor) -> int:
    flat = tensor.detach().contiguous().flatten()
    return int(flat.view(_BITS[flat.element_size()]).sum(dtype=torch.int64)) if flat.numel() else 0
