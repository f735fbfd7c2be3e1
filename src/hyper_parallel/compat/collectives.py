"""Functional collectives, the same calls in a captured graph and in a real run.

The functional collectives of PyTorch, called at the operator level: no wrapper tensor, waited for at once.
Tensors are made contiguous, which the operators need. `counting` lists those that a block of code calls.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from hyper_parallel.compat import gloo as _gloo  # noqa: F401  registers kernels
from hyper_parallel.compat.collective_counter import Collective, counting

__all__ = [
    "Collective",
    "all_gather",
    "all_gather_coalesced",
    "all_reduce",
    "all_to_all",
    "all_to_all_begun",
    "counting",
    "device_type",
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "waited",
]

_ops = torch.ops._c10d_functional


def all_reduce(x: torch.Tensor, group: str, op: str = "sum") -> torch.Tensor:
    """The sum (or `max`) of `x` over the group, on every rank."""
    return waited(_ops.all_reduce(x.contiguous(), op, group))


def all_gather(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """[d0, ...] of each rank to [size · d0, ...], in rank order. All ranks give the same shape."""
    return waited(_ops.all_gather_into_tensor(x.contiguous(), size, group))


def reduce_scatter(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """[size · d0, ...] to [d0, ...]: each rank gets its chunk of dim 0 of the sum over the group."""
    return waited(_ops.reduce_scatter_tensor(x.contiguous(), "sum", size, group))


def all_gather_coalesced(xs: list[torch.Tensor], group: str, size: int) -> list[torch.Tensor]:
    """`all_gather` of several tensors in one call."""
    return [waited(x) for x in _ops.all_gather_into_tensor_coalesced(xs, size, group)]


def reduce_scatter_coalesced(xs: list[torch.Tensor], group: str, size: int) -> list[torch.Tensor]:
    """`reduce_scatter` of several tensors in one call."""
    return [waited(x) for x in _ops.reduce_scatter_tensor_coalesced(xs, "sum", size, group)]


def all_to_all(x: torch.Tensor, send: list[int], receive: list[int], group: str) -> torch.Tensor:
    """[sum(send), ...] to [sum(receive), ...]: `send[i]` rows of each rank, in order, to rank i of the group."""
    return waited(_ops.all_to_all_single(x.contiguous(), receive, send, group))


def all_to_all_begun(x: torch.Tensor, send: list[int], receive: list[int], group: str) -> torch.Tensor:
    """`all_to_all` that has begun: its result may be used once it went through `waited`, and `x` written then."""
    begun: torch.Tensor = _ops.all_to_all_single(x.contiguous(), receive, send, group)
    return begun


def waited(x: torch.Tensor) -> torch.Tensor:
    """The result of a collective that has begun, once it is there."""
    done: torch.Tensor = _ops.wait_tensor(x)
    return done


def device_type() -> str:
    """The type of device whose tensors the default process group moves."""
    if dist.get_backend() in ("gloo", "fake", "mpi"):
        return "cpu"
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None else accelerator.type
