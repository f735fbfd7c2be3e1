"""The dispatcher: operators as dispatched, the pytrees of their arguments, and what intercepts them.

Matrix products can be computed by a function of ours, and float32 arithmetic in float64. Global settings that choose
kernels are listed here, too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.library import Library, fallthrough_kernel
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # it has no public name
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import _FlopCounterMode

from hyper_parallel.compat.registry import backend

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
    """The function that an operator's call reaches, without the Python around it."""
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
    """Arguments that an operator writes to: tensors, or the nodes that stand for them in a graph."""
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


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves, and the shape of the tree: hashable, and equal for trees of the same shape."""
    return _pytree.tree_flatten(tree)


def leaves_of(tree: Any) -> list[Any]:
    """The leaves alone."""
    return _pytree.tree_leaves(tree)


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """A tree of the same shape, with what the function makes of each leaf."""
    return _pytree.tree_map(function, tree)


def unflatten(leaves: Iterable[Any], shape: Any) -> Any:
    """The tree of these leaves."""
    return _pytree.tree_unflatten(leaves, shape)


def kernel_settings() -> list[Any]:
    """Settings of kernels in this process, as plain data."""
    attention = torch.backends.cuda
    return [
        str(torch.get_default_dtype()),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        [attention.flash_sdp_enabled(), attention.mem_efficient_sdp_enabled()],
        [attention.math_sdp_enabled(), attention.cudnn_sdp_enabled()],
        torch.backends.cudnn.enabled,
        torch.backends.mkldnn.is_available(),
    ]


def device_facts(device: torch.device) -> list[Any]:
    """Name of the device, and the number of the one that is meant where none is given; empty for the host."""
    if device.type in ("cpu", "meta") or not torch.accelerator.is_available():
        return []
    return [backend(device.type).device_name(), torch.accelerator.current_device_index()]


# Matrix products of a thread, computed by a function of ours wherever PyTorch calls them.
#
# The dispatcher has a key above autograd and all devices that PyTorch's own tests use, and that is off unless a thread
# turns it on. Here it has kernels of the matrix products, and every other operator falls through it at no cost.
# Products inside other operators (einsum) are seen as well. A `TorchFunctionMode` would not see those, and would be
# shown every attribute of every tensor that is read: 75 calls in a layer of a Llama, 7 of them products.

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor | None]
"""x [M, K] or [B, M, K], weight [K, N] or [B, K, N] and bias (broadcast to the result) to the product; None to have it
computed as usual."""

_KEY = "TESTING_ONLY_GenericWrapper"


class products_by(AbstractContextManager[None]):
    """In the block, products of this thread are computed by a function; the innermost block counts."""

    def __init__(self, product: Product) -> None:
        self._product = product
        self._entered: list[tuple[Product | None, Any]] = []

    def __enter__(self) -> None:
        on = torch._C._IncludeDispatchKeyGuard(_key())  # type: ignore[attr-defined]
        on.__enter__()
        self._entered.append((_CURRENT.product, on))
        _CURRENT.product = self._product

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _CURRENT.product, on = self._entered.pop()
        on.__exit__(kind, error, trace)


def unchanged_products() -> AbstractContextManager[Any]:
    """In the block, products are PyTorch's own."""
    return torch._C._ExcludeDispatchKeyGuard(_keys())  # type: ignore[no-any-return, attr-defined]


class _Current(threading.local):
    product: Product | None = None


_CURRENT = _Current()


def _mm(x: Tensor, weight: Tensor) -> Tensor:
    with unchanged_products():
        found = _found(x, weight, None)
        return torch.mm(x, weight) if found is None else found


def _bmm(x: Tensor, weight: Tensor) -> Tensor:
    with unchanged_products():
        found = _found(x, weight, None)
        return torch.bmm(x, weight) if found is None else found


def _addmm(bias: Tensor, x: Tensor, weight: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    with unchanged_products():
        found = _found(x, weight, bias) if beta == alpha == 1 else None
        return torch.addmm(bias, x, weight, beta=beta, alpha=alpha) if found is None else found


def _baddbmm(bias: Tensor, x: Tensor, weight: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    with unchanged_products():
        found = _found(x, weight, bias) if beta == alpha == 1 else None
        return torch.baddbmm(bias, x, weight, beta=beta, alpha=alpha) if found is None else found


def _found(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    assert _CURRENT.product is not None, "the key is on, and no function is known"
    return _CURRENT.product(x, weight, bias)


@cache
def _key() -> Any:
    """The key, whose kernels are registered when it is first asked for."""
    others, own = Library("_", "IMPL", _KEY), Library("aten", "IMPL", _KEY)
    others.fallback(fallthrough_kernel)
    for name, kernel in (("mm", _mm), ("bmm", _bmm), ("addmm", _addmm), ("baddbmm", _baddbmm)):
        own.impl(name, kernel)
    _LIBRARIES.extend((others, own))
    return torch._C._dispatch_key_parse(_KEY)


@cache
def _keys() -> Any:
    return torch._C.DispatchKeySet(_key())


_LIBRARIES: list[Library] = []
"""Kernels are registered as long as their library is there."""


# A training step in float64, to tell an error from rounding.
#
# Two right ways to add up a sum differ by their rounding. How much comes out in the end depends on the model: a softmax
# of large scores or a norm of small values multiplies it. In float64 it is 2²⁹ times smaller, and a mistake is as large
# as before.
#
# Models ask for float32 in places of their own (norms, softmaxes, tables of angles), so it is not enough to give them
# float64 weights: inside `float64`, whoever asks for float32 gets float64.


class _Float64(TorchDispatchMode):
    """Reads float32 as float64 in every operation. A function mode would not see backward passes."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {key: _wide(value) for key, value in (kwargs or {}).items()}
        return func(*(_wide(value) for value in args), **given)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Inside, arithmetic that would be float32 is float64, in backward passes too."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(default)


def widen(model: nn.Module) -> None:
    """Make float64 of what is still float32 in a model that was filled: buffers, and on one device parameters."""
    for parameter in model.parameters():
        if parameter.dtype == torch.float32:
            parameter.data = parameter.data.double()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype == torch.float32:
                module._buffers[name] = buffer.double()
