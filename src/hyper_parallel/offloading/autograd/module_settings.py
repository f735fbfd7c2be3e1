"""Module settings: attributes and hooks, beside tensors, that decide what modules compute.

A graph holds for the settings under which it was captured. When one changes, `dropout.p` for example, or a hook is
added, the call gets another graph. Attributes that the forward pass itself changes, such as counters, are left out:
they would make every call a new one.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import nn

from hyper_parallel.compat.dispatch import hooks_of, hooks_of_all

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)


class Settings:
    """Those of one model."""

    def __init__(self) -> None:
        self._changing: set[tuple[str, str]] = set()

    def of(self, model: nn.Module) -> Hashable:
        """Equal as long as nothing has changed."""
        found = tuple(item for item in _all(model) if item[0] not in self._changing)
        return found, hooks_of_all()

    @contextlib.contextmanager
    def followed(self, model: nn.Module) -> Iterator[None]:
        """Around a forward pass: what it changes does not count from now on."""
        before = dict(_all(model))
        yield
        after = dict(_all(model))
        self._changing |= {
            name for name in before.keys() | after.keys() if before.get(name, _NONE) != after.get(name, _NONE)
        }


_NONE = object()


def _all(model: nn.Module) -> Iterator[tuple[tuple[str, str], Hashable]]:
    """(module, attribute) and value. An object that modules share, such as a config, counts once."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        yield (name, ""), id(type(module))
        if module is not model:  # whose own hooks run around its graph
            yield (name, "hooks"), hooks_of(module)
        for key, value in vars(module).items():
            parts = value if isinstance(value, tuple) else (value,)
            if all(isinstance(part, _PLAIN) for part in parts) or (
                isinstance(value, _CODE) and module is not model
            ):
                yield (name, key), value
            # The state of an object that replaces a forward method is not a setting of the model.
            elif key[:1] != "_" and key != "forward" and _is_settings(value) and id(value) not in seen:
                seen.add(id(value))
                for inner, kept in vars(value).items():
                    if isinstance(kept, _PLAIN):
                        yield (name, f"{key}.{inner}"), kept


def _is_settings(value: Any) -> bool:
    """Whether an object is a container of settings, such as a config, and not a module, a tensor or a class."""
    return hasattr(value, "__dict__") and not isinstance(
        value, (nn.Module, torch.Tensor, type, types.ModuleType, *_CODE)
    )
