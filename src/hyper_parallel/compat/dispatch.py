"""The dispatcher below autograd: operators as dispatched, and the autograd node that calls them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # it has no public name
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import _FlopCounterMode

from hyper_parallel.compat.pytree import leaves_of

T = TypeVar("T")


def next_sequence() -> int:
    """The number that the next operator of the forward pass gets; backward nodes bear that of their forward."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def running_backward() -> int | None:
    """The sequence number of the backward node that is running; None in a forward pass.

    Nodes that belong to no operator of the forward pass, such as a gradient's accumulation, have a very large one.
    """
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def keeps_graph() -> bool:
    """Whether the backward pass that is running was asked to keep its graph for another one."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Operators in the block go straight to the device's kernels: nothing is recorded for a backward pass, and nothing
    is cast."""
    with torch._C._AutoDispatchBelowAutograd(), without_autocast():
        yield


def without_autocast() -> contextlib.AbstractContextManager[Any]:
    """Operators in the block are given what they are given, whatever `torch.autocast` is on."""
    return torch._C._DisableAutocast()  # type: ignore[no-any-return]


def autocast_state(device: str) -> tuple[bool, torch.dtype, bool]:
    """Whether `torch.autocast` is on for a kind of device, its dtype, and whether it keeps what it cast."""
    return (
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.is_autocast_cache_enabled(),
    )


def version(tensor: torch.Tensor) -> int:
    """How often what is in the tensor's memory was changed in place."""
    return int(tensor._version)


def outside_modes() -> contextlib.AbstractContextManager[Any]:
    """Operators in the block are those of real tensors, whatever modes are on."""
    return _disable_current_modes()  # type: ignore[no-untyped-call,no-any-return]


def kernel(operator: Any) -> Callable[..., Any]:
    """What calling an operator calls: without the Python around it."""
    return getattr(operator, "_op", operator)  # type: ignore[no-any-return]


def once_each(question: Callable[[Any], T]) -> Callable[[Any], T]:
    """A question about operators that is answered once for each: `functools.cache` by identity, since hashing an
    operator takes longer than most answers. What was asked about is kept."""
    known: dict[int, tuple[Any, T]] = {}

    def answer(operator: Any) -> T:
        found = known.get(id(operator))
        if found is None:
            found = known[id(operator)] = (operator, question(operator))
        return found[1]

    return answer


@once_each
def writes_nothing(operator: Any) -> bool:
    """Whether an operator changes none of its arguments, whatever they are."""
    return not _arguments_written(operator) and not _arguments_with_statistics(operator)


def mutated_arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """What an operator writes to, among its arguments: tensors, or the nodes that stand for them in a graph."""
    for at, name in _arguments_written(operator):
        value = args[at] if at < len(args) else kwargs.get(name)
        yield from (leaf for leaf in leaves_of(value) if leaf is not None)
    names = _arguments_with_statistics(operator)
    if names:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if given.get("training", True):
            yield from (given[name] for name in _STATISTICS if given.get(name) is not None)


_STATISTICS = ("running_mean", "running_var")
_CHANGES_STATISTICS = frozenset(
    f"aten::{name}"
    for name in (
        "native_batch_norm",
        "cudnn_batch_norm",
        "miopen_batch_norm",
        "batch_norm_update_stats",
        "batch_norm_gather_stats",
        "batch_norm_gather_stats_with_counts",
    )
)
"""Operators that update running statistics in training, although their schemas do not declare it."""


@once_each
def _arguments_with_statistics(operator: Any) -> tuple[str, ...]:
    """The names of all arguments of an operator of `_CHANGES_STATISTICS`; none of another one."""
    schema = getattr(operator, "_schema", None)
    if schema is None or schema.name not in _CHANGES_STATISTICS:
        return ()
    return tuple(argument.name for argument in schema.arguments)


@once_each
def _arguments_written(operator: Any) -> tuple[tuple[int, str], ...]:
    """Places and names of those arguments; a schema takes long to ask."""
    schema = getattr(operator, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    return tuple(
        (at, argument.name)
        for at, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes of a module that hold its hooks, by numbers that PyTorch gives once."""
HOOKS_OF_ALL = tuple(f"_global{name}" for name in HOOKS)
"""Attributes of `torch.nn.modules.module` that hold the hooks that run for every module."""


def global_state(device: str) -> Hashable:
    """Settings of PyTorch that decide which operators and kernels a forward pass chooses, on a kind of device."""
    return (
        autocast_state(device),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cudnn.enabled,
        torch._C._get_mkldnn_enabled(),
    )


def transform_around() -> str | None:
    """What around the running code needs its operators one by one, and no graph of them; None where nothing does."""
    interpreter = torch._C._functorch.peek_interpreter_stack()
    if interpreter is not None:
        return f"torch.func ({str(interpreter.key()).rpartition('.')[-1].lower()})"
    if torch.jit.is_tracing():
        return "torch.jit.trace"
    modes = _get_current_dispatch_mode_stack()
    if any(isinstance(mode, _FlopCounterMode) for mode in modes):
        return "FlopCounterMode"
    if any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()):
        return "a TorchFunctionMode"
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return "saved_tensors_hooks (a checkpoint, for example)"
    return None
