"""Snapshots of Python state: what a forward pass may read, by path, as tokens that two calls compare."""

from __future__ import annotations

import argparse
import ast
import collections
import contextvars
import functools
import inspect
import operator
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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyper_parallel.errors import CaptureError


@dataclass(frozen=True, eq=False)
class Place:
    """Where a value is: an item of a dict or a list, an attribute, or a closure's cell."""

    container: Any
    key: Any
    path: str
    within: str = ""
    """Path of the container (`Snapshot.containers`)."""

    def get(self) -> Any:
        """The value; MISSING where there is none."""
        try:
            if isinstance(self.container, types.CellType):
                return self.container.cell_contents
            if isinstance(self.key, Slot):
                return getattr(self.container, self.key.name)
            if isinstance(self.container, dict):  # whose class may answer by its own code
                return dict.__getitem__(self.container, self.key)
            return self.container[self.key]
        except (KeyError, IndexError, AttributeError, ValueError):
            return MISSING

    def set(self, value: Any) -> None:
        """Put a value there; MISSING takes it away."""
        if isinstance(self.container, types.CellType):
            self.container.cell_contents = value
        elif isinstance(self.key, Slot):
            setattr(self.container, self.key.name, value)
        elif value is MISSING:
            self.container.pop(self.key, None)
        else:
            self.container[self.key] = value


@dataclass(frozen=True)
class Slot:
    """The name of an attribute that is in no `__dict__`."""

    name: str


@dataclass
class Snapshot:
    """The Python state of one moment."""

    entries: dict[str, Hashable] = field(default_factory=dict)
    """Path to what is compared."""
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    """The model's parameters and buffers (`graph.ir`)."""
    tensors: dict[str, Place] = field(default_factory=dict)
    """Places of tensors beside those."""
    references: list[Place] = field(default_factory=list)
    """Places of weak references to tensors: an RNN's to its weights."""
    containers: dict[str, Any] = field(default_factory=dict)
    """What the walk went through and may change, by path; with a dot at the end where its items are attributes."""
    changing: list[tuple[str, Any]] = field(default_factory=list)
    """Objects whose state is asked each time: random generators, iterators, arrays."""
    caches: list[Any] = field(default_factory=list)
    """Functions with a `functools.lru_cache`."""
    codes: list[types.CodeType] = field(default_factory=list)
    """Code that a forward pass may run, beside PyTorch's."""
    _watches: list[list[Any]] = field(default_factory=list)
    """[what gives items of a container, the container, the items, the container's length]."""
    _empty: list[Any] = field(default_factory=list)

    def unchanged(self) -> bool:
        """Whether everything that the walk met is still the same object at its place, and tensors of the same kind."""
        try:
            if any(self._empty):
                return False
            for watch in self._watches:
                getter, container, values, size = watch
                if len(container) != size:
                    return False
                if not all(map(operator.is_, getter(container), values)):
                    now = tuple(getter(container))
                    if not all(map(_alike, now, values)):
                        return False
                    watch[2] = now
        except (KeyError, IndexError, AttributeError, ValueError):
            return False
        return all(
            self.entries[path] == tensor_token(place.get()) for path, place in self.tensors.items()
        ) and all(self.entries[path] == state_token(value) for path, value in self.changing)

    def watch(self, container: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        """Have `unchanged` look at some items of a dict or list."""
        if not len(container):
            self._empty.append(container)
            return
        getter: Callable[[Any], Any] = _none_of
        if keys:
            # With one key an itemgetter gives no tuple.
            keys, values = (keys, values) if len(keys) > 1 else (list(keys) * 2, list(values) * 2)
            getter = operator.itemgetter(*keys)
            if isinstance(container, dict) and type(container).__getitem__ not in _LOOKUPS:
                getter = functools.partial(_looked_up, keys)
        self._watches.append([getter, container, tuple(values), len(container)])

    def watch_attributes(self, value: Any, names: Sequence[str]) -> None:
        """Have `unchanged` look at attributes that are in no `__dict__`, or at a cell."""
        for name in names:
            self._watches.append([_getter_of(name), _Sized(value), (getattr(value, name),), 1])

    def watch_items(self, container: Any) -> None:
        """Have `unchanged` look at all items of a list, deque or set."""
        if not container:
            self._empty.append(container)
        else:
            self._watches.append([iter, container, tuple(container), len(container)])

    def clear_caches(self) -> None:
        """Empty the caches of functions, which may hold tensors that a capture or a check has made."""
        for function in self.caches:
            function.cache_clear()

    def difference(self, entries: Mapping[str, Hashable]) -> str | None:
        """The first of `entries` that is another one now, in words; None where all are the same."""
        for path, token in entries.items():
            now = self.entries.get(path, MISSING)
            if now != token:
                what = path.removesuffix(".*").removesuffix("()")
                before, after = shown(token), shown(now)
                return what if before == after else f"{what} ({before}, now {after})"
        return None


def _alike(one: Any, other: Any) -> bool:
    """Whether two objects are the same, or numbers or strings of one type and value."""
    if one is other:
        return True
    kind = type(one)
    return kind is type(other) and (
        repr(one) == repr(other) if kind in FLOATS else kind in ATOMS and one == other
    )


@dataclass(frozen=True, eq=False)
class _Sized:
    """An object as a container of one item."""

    value: Any

    def __len__(self) -> int:
        return 1


_LOOKUPS = {dict.__getitem__, collections.OrderedDict.__getitem__}


def _looked_up(keys: Sequence[Any], container: dict[Any, Any]) -> list[Any]:
    """Items of a dict whose class answers by its own code."""
    return [dict.__getitem__(container, key) for key in keys]


def _none_of(container: Any) -> tuple[()]:
    return ()


def _getter_of(name: str) -> Callable[[Any], tuple[Any]]:
    return lambda sized: (getattr(sized.value, name),)


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
    """Whether a class finds attributes by its own code."""
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


_ATTRIBUTE_LOOKUPS = frozenset({"getattr", "hasattr"})


@functools.lru_cache(4096)
def reads_unnamed(code: types.CodeType) -> bool:
    """Whether code may read attributes that it does not name: ``getattr(self, f"layer_{at}")``."""
    if not _DYNAMIC.isdisjoint(code.co_names):
        return True
    if _ATTRIBUTE_LOOKUPS.isdisjoint(code.co_names):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError, TypeError):
        return True
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    named = (ast.unparse(call.func) not in _ATTRIBUTE_LOOKUPS or _is_constant(call.args) for call in calls)
    return not all(named)


def _is_constant(arguments: Sequence[ast.expr]) -> bool:
    return len(arguments) > 1 and isinstance(arguments[1], ast.Constant)
