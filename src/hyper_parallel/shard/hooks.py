"""Wraps a module's forward without replacing the module.

A module's class is swapped for a subclass of itself whose `forward` calls the module's own through a list of
wrappers. The object, its name, its parameters' names, ``isinstance`` and the class's name stay what they were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hyper_parallel.errors import StrategyError

Forward = Callable[..., Any]
Wrapper = Callable[..., Any]
"""Called as ``wrapper(forward, *args, **kwargs)``; returns what the module returns."""

_ATTRIBUTE = "_hyper_parallel_wrappers"
_OWN_FORWARD = "_hyper_parallel_own_forward"


def wrap(module: nn.Module, wrapper: Wrapper) -> None:
    """Put `wrapper` around the module's forward, outside of those that are there already."""
    wrappers = module.__dict__.setdefault(_ATTRIBUTE, [])
    if not wrappers:
        # A forward that the user set on the module itself would be called in the place of the class's.
        if "forward" in module.__dict__:
            module.__dict__[_OWN_FORWARD] = module.__dict__.pop("forward")
        module.__class__ = _wrapped(type(module))
    wrappers.append(wrapper)


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _wrapped(cls: type[nn.Module]) -> type[nn.Module]:
    if cls in _classes:
        return _classes[cls]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call: Forward = self.__dict__.get(_OWN_FORWARD) or functools.partial(cls.forward, self)
        for wrapper in self.__dict__[_ATTRIBUTE]:
            call = functools.partial(wrapper, call)
        return call(*args, **kwargs)

    functools.update_wrapper(forward, cls.forward)
    body = {"forward": forward, "__module__": cls.__module__, "__doc__": cls.__doc__}
    _classes[cls] = type(cls.__name__, (cls,), body)
    return _classes[cls]


class StandIn(nn.Module):
    """Stands in the place of a module: returns the same, whatever it is given, and keeps the first argument."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output
        self.seen: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = args[0] if args else None
        return self.output


def change_input(change: Callable[[Any], Any]) -> Wrapper:
    """A wrapper that changes the activations that a module is given: `hidden_states`, or the first argument."""

    def wrapper(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if "hidden_states" in kwargs:
            return forward(*args, **{**kwargs, "hidden_states": change(kwargs["hidden_states"])})
        first, *rest = args
        return forward(change(first), *rest, **kwargs)

    return wrapper


def change_output(change: Callable[[Any], Any]) -> Wrapper:
    """A wrapper that changes the activations that a module returns: the tensor, or the first of a tuple."""

    def wrapper(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if isinstance(output, tuple | list):
            return (change(output[0]), *output[1:])
        return change(output)

    return wrapper


def at_edges(layers: nn.Module, enter: Callable[[Any], Any], leave: Callable[[Any], Any]) -> None:
    """Change activations on the way into the first of a list of layers, and on the way out of the last."""
    assert isinstance(layers, nn.ModuleList)
    wrap(layers[0], change_input(enter))
    wrap(layers[-1], change_output(leave))


def all_positions(gather: Callable[[Tensor], Tensor], split: Callable[[Tensor], Tensor]) -> Wrapper:
    """A wrapper of a module that sees whole sequences where those around it see some of the positions: `gather` is done
    to what it is given, the first activations and all that are shaped like them, and `split` to what it returns."""

    def wrapper(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        first: Any = kwargs.get("hidden_states", args[0] if args else None)
        if not _is_activations(first):
            raise StrategyError(
                "a module that needs all positions is given no activations [batch, positions, features] first, so that "
                "they cannot be gathered for it; leave sequence, tensor_y and context out for this model"
            )
        shape = first.shape[:2]

        def enter(x: Any) -> Any:
            return gather(x) if _is_activations(x) and x.shape[:2] == shape else x

        output = forward(*(enter(x) for x in args), **{key: enter(x) for key, x in kwargs.items()})
        if isinstance(output, tuple | list):
            whole = output[0].shape[:2]
            return tuple(split(x) if _is_activations(x) and x.shape[:2] == whole else x for x in output)
        return split(output)

    return wrapper


def _is_activations(x: Any) -> bool:
    """Whether it is [batch, positions, features]."""
    return isinstance(x, Tensor) and x.dim() == 3 and x.is_floating_point()
