"""A training step in float64, to tell an error from rounding.

Two right ways to add up a sum differ by their rounding. How much comes out in the end depends on the model: a softmax
of large scores or a norm of small values multiplies it. In float64 it is 2²⁹ times smaller, and a mistake is as large
as before.

Models ask for float32 in places of their own (norms, softmaxes, tables of angles), so it is not enough to give them
float64 weights: inside `float64`, whoever asks for float32 gets float64.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hyper_parallel.compat.dispatch import TorchDispatchMode


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
