"""Snapshots of Python state: what a forward pass may read, by path, and whether it is still the same."""

from __future__ import annotations

import collections
import functools
import operator
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hyper_parallel.offloading.autograd.state_tokens import (
    ATOMS,
    FLOATS,
    MISSING,
    shown,
    state_token,
    tensor_token,
)


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
            if isinstance(self.container, dict):  # whose class may answer by code of its own
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
    """The model's parameters and buffers (`graph.module_state`)."""
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
    """Items of a dict whose class answers by code of its own."""
    return [dict.__getitem__(container, key) for key in keys]


def _none_of(container: Any) -> tuple[()]:
    return ()


def _getter_of(name: str) -> Callable[[Any], tuple[Any]]:
    return lambda sized: (getattr(sized.value, name),)
