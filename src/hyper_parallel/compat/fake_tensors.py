"""Fake tensors and fake ranks: nothing is allocated and nothing sent.

One rank of any number of them; kernels of fake tensors that PyTorch lacks; the real process groups set aside meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _register_process_group, _unregister_all_process_groups
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import _disable_current_modes

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
            fake = empty(old.to_local() if isinstance(old, DTensor) else old)
            if isinstance(old, DTensor):
                fake = DTensor.from_local(
                    fake,
                    old.device_mesh,
                    old.placements,
                    run_check=False,
                    shape=old.shape,
                    stride=old.stride(),
                )
        return nn.Parameter(fake, old.requires_grad)

    fsdp.replace_parameters(model, make)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = empty(buffer)


# The process groups of this process set aside for a while, so that others can be made in their place.
#
# PyTorch keeps one default process group and a registry of groups by name. A check that simulates ranks needs its own
# default group, even in a worker that already has real groups. The real groups are only set aside: nothing is sent and
# nothing is destroyed.

_REGISTRIES = (
    "_pg_map",
    "_pg_names",
    "_pg_group_ranks",
    "_pg_backend_config",
    "_tags_to_pg",
    "_pg_to_tag",
)


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """Inside there is no process group, and one may be made; it has to be destroyed before the end.

    Afterwards the groups that were there are back, under their names. No collective.
    """
    if not dist.is_initialized():
        yield
        return
    world, hook = c10d._world, sys.excepthook
    kept = {name: dict(getattr(c10d, name)) for name in _REGISTRIES}
    default, count, method = world.default_pg, c10d._group_count, c10d._default_pg_init_method
    for name in _REGISTRIES:
        getattr(c10d, name).clear()
    world.default_pg = None
    try:
        yield
    finally:
        for name, entries in kept.items():
            getattr(c10d, name).clear()
            getattr(c10d, name).update(entries)
        world.default_pg = default
        c10d._group_count, c10d._default_pg_init_method = count, method
        # Destroying the default group that was made inside unregistered every group that C++ knows by name.
        _unregister_all_process_groups()
        for group, group_name in kept["_pg_names"].items():
            _register_process_group(group_name, group)
        sys.excepthook = hook


def is_simulation() -> bool:
    """Whether the default process group stands for ranks that no process runs."""
    return dist.is_initialized() and dist.get_backend() == "fake"


def fake_kernel(operator: Any) -> Callable[..., Any] | None:
    """A function of the operator's fake arguments to its fake result; None where PyTorch's own is right."""
    return _KERNELS.get(operator)


def _grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Matrix products of groups of rows (or of a sum's terms, between two matrices). PyTorch's fake kernel takes bf16
    only and gives contiguous rows; the kernels take fp32 too and round each row up to 16 bytes."""
    flat = mat_a.dim() == 2, mat_b.dim() == 2
    rows, columns = mat_a.size(-2), mat_b.size(-1)
    if flat[0] == flat[1]:
        groups = offs.size(0) if flat[0] and offs is not None else mat_a.size(0)
        shape = [groups, rows, columns]
    else:
        shape = [rows, columns]
    dtype = out_dtype or mat_a.dtype
    unit = 16 // dtype.itemsize
    pitch = -(-columns // unit) * unit
    strides = [rows * pitch, pitch, 1][-len(shape) :]
    return mat_a.new_empty_strided(shape, strides, dtype=dtype)


def _fused_adamw(*_: Any, **__: Any) -> None:
    """All of it is written in place. PyTorch has no fake kernel of it with a tensor for the learning rate, and runs the
    real one on zeros instead, which takes four times the memory of the parameter."""


def _mkldnn_rnn_layer(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """A layer of an LSTM by oneDNN, which alone knows how large its workspace is: asked of the kernel, once for each
    kind of call. PyTorch's fake kernel says that there is none."""
    *results, workspace = torch.ops.aten.mkldnn_rnn_layer.default(*arguments)
    kinds = tuple(
        (tuple(argument.shape), argument.dtype) if isinstance(argument, torch.Tensor) else _hashable(argument)
        for argument in arguments
    )
    return (*results, workspace.new_empty(_rnn_workspace(kinds)))


def _hashable(argument: Any) -> Any:
    return tuple(argument) if isinstance(argument, list) else argument


@functools.lru_cache(256)
def _rnn_workspace(kinds: tuple[Any, ...]) -> int:
    """Bytes; `kinds`: (shape, dtype) of tensors, and the other arguments."""
    with _disable_current_modes(), torch.enable_grad():  # type: ignore[no-untyped-call]
        given = [_zeros(kind) for kind in kinds]
        return int(torch.ops.aten.mkldnn_rnn_layer.default(*given)[-1].numel())


def _zeros(kind: Any) -> Any:
    if not isinstance(kind, tuple):
        return kind
    if len(kind) != 2 or not isinstance(kind[1], torch.dtype):
        return list(kind)
    return torch.zeros(kind[0], dtype=kind[1], device="cpu")


_KERNELS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._grouped_mm.default: _grouped_mm,
    torch.ops.aten._fused_adamw_.tensor_lr: _fused_adamw,
    torch.ops.aten.mkldnn_rnn_layer.default: _mkldnn_rnn_layer,
}
