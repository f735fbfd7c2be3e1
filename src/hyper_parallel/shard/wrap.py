"""Adding behaviour around a module's forward without replacing the module.

A module's class is swapped for a subclass of itself whose `forward` calls the module's own through a list of
wrappers. The object, its name, its parameters' names, ``isinstance`` and the class's name stay what they were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

Forward = Callable[..., Any]
Wrapper = Callable[..., Any]
"""Called as ``wrapper(forward, *args, **kwargs)``; returns what the module returns."""

_ATTRIBUTE = "_hyper_parallel_wrappers"


def wrap(module: nn.Module, wrapper: Wrapper) -> None:
    """Put `wrapper` around the module's forward, outside of those that are there already."""
    wrappers = module.__dict__.setdefault(_ATTRIBUTE, [])
    if not wrappers:
        module.__class__ = _wrapped(type(module))
    wrappers.append(wrapper)


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _wrapped(cls: type[nn.Module]) -> type[nn.Module]:
    if cls in _classes:
        return _classes[cls]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call: Forward = functools.partial(cls.forward, self)
        for wrapper in self.__dict__[_ATTRIBUTE]:
            call = functools.partial(wrapper, call)
        return call(*args, **kwargs)

    functools.update_wrapper(forward, cls.forward)
    body = {"forward": forward, "__module__": cls.__module__, "__doc__": cls.__doc__}
    _classes[cls] = type(cls.__name__, (cls,), body)
    return _classes[cls]


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
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    return wrapper
