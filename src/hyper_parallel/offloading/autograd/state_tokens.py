"""Tokens of Python objects: what of an object is compared between two calls, and which objects hold settings."""

from __future__ import annotations

import argparse
import ast
import collections
import contextvars
import functools
import inspect
import os
import pickle
import queue
import random
import sys
import sysconfig
import textwrap
import threading
import types
import weakref
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyper_parallel.errors import CaptureError

ATOMS = frozenset(
    {bool, int, str, bytes, type(None), type(...), range, torch.dtype, torch.device, torch.layout}
    | {torch.memory_format, torch.Size}
)
"""Types whose values are compared."""
FLOATS = (float, complex)
CONFIGS = (
    types.SimpleNamespace,
    argparse.Namespace,
    collections.UserDict,
    collections.UserList,
    collections.ChainMap,
    threading.local,
    queue.Queue,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
)
"""The standard library's containers of settings, all of whose attributes count."""
OPAQUE = frozenset({"torch", "numpy", "hyper_parallel", "functorch", "builtins"}) | sys.stdlib_module_names
"""Packages whose objects are compared by identity, and whose functions' globals are not looked at."""
_PACKAGES = tuple(
    {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sysconfig.get_path("stdlib")}
)
_ARRAY_BYTES = 1 << 20
"""The largest array that each call compares."""
MISSING = object()


@dataclass(frozen=True, eq=False)
class Identity:
    """An object that is compared by identity, and kept, so that no other one gets its address."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def tensor_token(value: Any) -> Hashable:
    """Return the metadata of a tensor; MISSING for anything else."""
    if not isinstance(value, torch.Tensor):
        return MISSING
    if value.layout != torch.strided:
        return "tensor", value.shape, value.layout, value.dtype
    return "tensor", value.shape, value.stride(), value.dtype, value.device, value.requires_grad


def key_token(key: Any) -> Hashable:
    """Return what is compared of a key of a dict or an item of a set."""
    if type(key) in ATOMS or type(key) in FLOATS:
        return type(key), key
    if isinstance(key, tuple):
        return tuple(map(key_token, key))
    return Identity(key)


def has_state(value: Any) -> bool:
    """Whether an object may change in no attribute: a random generator, an iterator, an array, an environment."""
    owner = type(value)
    if package(owner.__module__) == "numpy":
        return not callable(value) and not isinstance(value, types.ModuleType)
    if isinstance(value, CONFIGS) or callable(value) or isinstance(value, types.GeneratorType):
        return False
    standard = package(owner.__module__) in sys.stdlib_module_names or owner.__module__ == "builtins"
    return standard and not isinstance(value, type | types.ModuleType)


def state_token(value: Any) -> Hashable:
    """The state of such an object; itself where nobody can say."""
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, contextvars.ContextVar):
        content = value.get(None)
        return (type(content), content) if type(content) in ATOMS else Identity(content)
    if isinstance(value, types.MappingProxyType | os._Environ):
        return frozenset((key_token(key), key_token(item)) for key, item in value.items())
    if hasattr(value, "bit_generator"):
        return repr(value.bit_generator.state)
    if hasattr(value, "tobytes"):  # an array, and also a number of NumPy
        if value.nbytes > _ARRAY_BYTES if hasattr(value, "nbytes") else len(value) > _ARRAY_BYTES:
            raise CaptureError(
                f"the model refers to an array of {len(value):,} rows, too large to compare at each call; make it a "
                "buffer (register_buffer), or an input"
            )
        return str(getattr(value, "dtype", "")), getattr(value, "shape", None), value.tobytes()
    try:
        content = pickle.dumps(value)
    # Whatever it is that cannot be copied: a lock, a file.
    except Exception:
        return Identity(value)
    return content if len(content) <= _ARRAY_BYTES else Identity(value)


def shown(token: Any) -> str:
    """Return a token in the words of a log line."""
    if token is MISSING:
        return "absent"
    if isinstance(token, Identity):
        return getattr(token.value, "__qualname__", type(token.value).__name__)
    if isinstance(token, tuple) and len(token) == 2 and isinstance(token[0], type):
        return str(token[1])
    return "another" if not isinstance(token, str | int) else str(token)


# Kinds of objects.


def package(module: Any) -> str:
    """Return the first part of a module's name."""
    return str(module).partition(".")[0]


@functools.lru_cache(4096)
def is_users(file: str | None) -> bool:
    """Whether a file is a user's own: in no folder of installed packages."""
    if file is None:
        return False
    return not file.startswith((*_PACKAGES, str(Path(__file__).parents[2]), "<frozen"))


def is_opaque(value: Any) -> bool:
    """Whether an object is compared by identity alone."""
    if isinstance(value, CONFIGS) or holds_tensors(value):
        return False
    owner = type(value)
    return package(owner.__module__) in OPAQUE or not (hasattr(value, "__dict__") or slots(value))


def holds_tensors(value: Any) -> bool:
    """Whether an object of PyTorch's has tensors as attributes: a distribution, for example."""
    owner = type(value)
    if package(owner.__module__) != "torch" or isinstance(value, torch.Tensor | torch.nn.Module | type):
        return False
    return any(isinstance(item, torch.Tensor) for item in getattr(value, "__dict__", {}).values())


def answers_itself(owner: type) -> bool:
    """Whether a class finds attributes by code of its own."""
    return any(
        name in vars(base)
        for base in owner.__mro__
        if base not in (object, nn.Module)
        for name in ("__getattr__", "__getattribute__")
    )


def slots(value: Any) -> Sequence[str]:
    """Attributes that an object has outside of its `__dict__`."""
    owner = type(value)
    if owner not in _slots:
        bases = () if package(owner.__module__) in OPAQUE else owner.__mro__[:-1]
        _slots[owner] = [
            name
            for base in bases
            for name, slot in vars(base).items()
            if isinstance(slot, types.MemberDescriptorType)
        ]
    return _slots[owner]


_slots: weakref.WeakKeyDictionary[type, Sequence[str]] = weakref.WeakKeyDictionary()


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)


_DYNAMIC = frozenset({"vars", "__dict__", "eval", "exec", "attrgetter", "asdict", "globals", "locals"})


_LOOKUPS = frozenset({"getattr", "hasattr"})


@functools.lru_cache(4096)
def reads_unnamed(code: types.CodeType) -> bool:
    """Whether code may read attributes that it does not name: ``getattr(self, f"layer_{at}")``."""
    if not _DYNAMIC.isdisjoint(code.co_names):
        return True
    if _LOOKUPS.isdisjoint(code.co_names):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError, TypeError):
        return True
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    named = (ast.unparse(call.func) not in _LOOKUPS or _is_constant(call.args) for call in calls)
    return not all(named)


def _is_constant(arguments: Sequence[ast.expr]) -> bool:
    return len(arguments) > 1 and isinstance(arguments[1], ast.Constant)
