"""Module settings: attributes and hooks, beside tensors, that decide what modules compute.

A graph has followed them once. Where one has changed since, `dropout.p` for example, or a hook was added, the call is
of another kind and gets a graph of its own. What the forward pass changes by itself, as a counter, is left out: it
would make each call one of a kind.
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
    """(module, attribute) and value; of a config, or another object that modules share, once."""
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
            # What stands in the place of a forward method has a state of its own, which is no setting of the model.
            elif key[:1] != "_" and key != "forward" and _is_settings(value) and id(value) not in seen:
                seen.add(id(value))
                for inner, kept in vars(value).items():
                    if isinstance(kept, _PLAIN):
                        yield (name, f"{key}.{inner}"), kept


def _is_settings(value: Any) -> bool:
    """Whether an object has settings of its own: a config, and neither a module, a tensor nor a class."""
    return hasattr(value, "__dict__") and not isinstance(
        value, (nn.Module, torch.Tensor, type, types.ModuleType, *_CODE)
    )
