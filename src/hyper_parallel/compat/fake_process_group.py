"""Ranks and tensors without substance: one rank of any number of them, nothing sent and nothing allocated."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from hyper_parallel.compat import fsdp


@contextlib.contextmanager
def fake_ranks(world: int, rank: int) -> Iterator[None]:
    """Run the block as `rank` of a fake process group of `world` ranks, whose collectives return without values.

    For a world of one rank no process group is made. Raises RuntimeError when a process group exists already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("ranks cannot be faked in a process that has a process group already")
    if world == 1:
        yield
        return
    hook = sys.excepthook  # PyTorch puts one in its place that says the rank
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def fake_mode() -> FakeTensorMode:
    """A context in which tensors are made that have a shape, a dtype and a device, and no memory."""
    return FakeTensorMode()


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether the tensor has no values, so that nothing can be read from it."""
    return isinstance(tensor, FakeTensor)


def fake_of(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A tensor without memory like a real one."""
    return mode.from_tensor(tensor)


def asks_for_values(error: Exception) -> bool:
    """Whether the error is about reading a value of a fake tensor."""
    return isinstance(error, DataDependentOutputException | GuardOnDataDependentSymNode)


def has_unknown_shape(error: Exception) -> bool:
    """Whether the error is about a result whose shape depends on a fake tensor's values."""
    return isinstance(error, DynamicOutputShapeException)


def has_no_fake_kernel(error: Exception) -> bool:
    """Whether the error is about an operator that has no kernel for fake tensors."""
    return isinstance(error, UnsupportedOperatorException)


@contextlib.contextmanager
def faked(model: nn.Module, mode: FakeTensorMode, device: torch.device | str = "cpu") -> Iterator[None]:
    """Inside, the model's parameters and buffers are fake, each with the layout and the device of the real one
    (`device` for one on the meta device); afterwards the real ones are there again, untouched."""
    with _as_before(model):
        _exchange(model, lambda tensor: _empty(tensor, mode, device))
        yield


@contextlib.contextmanager
def aliased(model: nn.Module) -> Iterator[None]:
    """Inside, the model's parameters are others in the same memory, without hooks and gradients of the real ones."""
    with _as_before(model):
        fsdp.replace_parameters(model, lambda old: nn.Parameter(old.detach(), old.requires_grad))
        yield


@contextlib.contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    parameters = [(module, dict(module._parameters)) for module in model.modules()]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        # Also what was registered meanwhile goes.
        for module, own in parameters:
            if module._parameters.keys() != own.keys():
                module._parameters.clear()
            module._parameters.update(own)
        for module, held in buffers:
            if module._buffers.keys() != held.keys():
                module._buffers.clear()
            module._buffers.update(held)


def _empty(like: torch.Tensor, mode: FakeTensorMode, device: torch.device | str = "cpu") -> torch.Tensor:
    with mode:
        return torch.empty_strided(
            like.shape, like.stride(), dtype=like.dtype, device=device if like.is_meta else like.device
        )


def _exchange(model: nn.Module, empty: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def make(old: nn.Parameter) -> nn.Parameter:
        with torch.no_grad():
            made = empty(old.to_local() if isinstance(old, DTensor) else old)
            if isinstance(old, DTensor):
                made = DTensor.from_local(
                    made,
                    old.device_mesh,
                    old.placements,
                    run_check=False,
                    shape=old.shape,
                    stride=old.stride(),
                )
        return nn.Parameter(made, old.requires_grad)

    fsdp.replace_parameters(model, make)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = empty(buffer)
