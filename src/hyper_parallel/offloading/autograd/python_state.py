"""Guards on Python state: attributes, containers, closures, globals and hooks that a forward pass may read.

A captured graph holds for the Python state under which it was captured. Which state that is follows from the code: the
walk begins at the model's modules, and goes through their attributes, lists, dicts, sets, objects, hooks and functions;
of a function through its closure, its defaults and the globals that its code names. Attributes that none of that code
names are left out. Each leaf becomes an entry of a `Snapshot`, by its path: numbers and strings by value, functions and
unknown objects by identity, tensors by their metadata (the graph reads their values when it runs).

    holds(graph) ⇔ entries(graph) ⊆ entries(now)                                      guards as torch.compile has them

A call looks at the identity of what the walk met (`Snapshot.unchanged`), and walks again only where that differs.
"""

from __future__ import annotations

import collections
import enum
import functools
import os
import sys
import types
import weakref
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn

from hyper_parallel.compat.dispatch import HOOKS, HOOKS_OF_ALL
from hyper_parallel.errors import CaptureError
from hyper_parallel.graph.ir import state_tensors
from hyper_parallel.offloading.autograd.state_snapshot import (
    ATOMS,
    CONFIGS,
    FLOATS,
    MISSING,
    OPAQUE,
    Identity,
    Place,
    Slot,
    Snapshot,
    answers_itself,
    codes_of,
    has_state,
    holds_tensors,
    is_opaque,
    is_users,
    key_token,
    package,
    reads_unnamed,
    slots,
    state_token,
    tensor_token,
)

_LISTS = (list, tuple, collections.deque)
_ENTRIES = 100_000
"""Entries beyond which the walk stops."""


class PythonState:
    """The Python state of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.names: set[str] = {"forward", "__call__", "__getattr__", "__getitem__", "training"}
        """Attributes that some of the code names."""
        self._dynamic = False
        """Some of the code reads attributes that it does not name."""
        self._arguments: list[Any] = []
        self._last: Snapshot | None = None

    def now(self, arguments: Sequence[Any] = ()) -> Snapshot:
        """The state at this moment, with that of the objects among a call's arguments; the same object as before where
        nothing has changed."""
        self._arguments[:] = arguments
        if self._last is None or not self._last.unchanged():
            self._last = self._walked()
        return self._last

    def _walked(self) -> Snapshot:
        model = self._model()
        assert model is not None, "it is being called"
        while True:
            known = len(self.names), self._dynamic
            walk = _Walk(self.names, self._dynamic)
            walk.model(model, self._arguments)
            self._dynamic = walk.dynamic
            # A function that was met late may name attributes of what was met before.
            if (len(self.names), self._dynamic) == known:
                walk.snapshot.state = state_tensors(model)
                return walk.snapshot


class _Walk:
    """One walk, breadth first."""

    def __init__(self, names: set[str], dynamic: bool) -> None:
        self.names, self.dynamic, self.snapshot = names, dynamic, Snapshot()
        self._seen: dict[int, str] = {}
        self._met: list[Any] = []
        """What was seen, so that no address is used again during the walk."""
        self._queue: collections.deque[tuple[Any, Place]] = collections.deque()
        self._globals: dict[int, tuple[str, Any, dict[str, None]]] = {}
        """Names that code reads of modules and classes, by the address of the namespace or class."""
        self._functions: set[int] = set()
        self._contained: set[int] = set()
        self._names_used: collections.Counter[str] = collections.Counter()
        self._root: nn.Module | None = None
        self._tree: set[int] = set()
        """Addresses of the model's modules."""

    def model(self, model: nn.Module, arguments: list[Any]) -> None:
        """Walk through a model, through the hooks that run for every module, and through objects among arguments."""
        self._root, self._tree = model, set(map(id, model.modules()))
        self._add(model, Place([model], 0, "model"))
        self._add(arguments, Place([arguments], 0, ARGUMENTS))
        for name in HOOKS_OF_ALL:
            hooks = getattr(torch.nn.modules.module, name)
            self._dict(hooks, f"torch.nn.modules.module.{name}")
            # A capture has hooks there itself.
            self.snapshot.containers.pop(f"torch.nn.modules.module.{name}", None)
        while self._queue:
            value, place = self._queue.popleft()
            self._visit(value, place)
            if len(self.snapshot.entries) > _ENTRIES:
                raise CaptureError(
                    f"the model refers to more than {_ENTRIES:,} settings (the last is {place.path}), too many to "
                    "compare at each call; keep data sets and the like outside of the model and its hooks"
                )
        for name, namespace, keys in self._globals.values():
            if is_users(_file_of(namespace)):
                self._contain(f"{name}.", namespace)
            self._watch(vars(namespace) if isinstance(namespace, type) else namespace, list(keys))

    def _add(self, value: Any, place: Place) -> None:
        self._queue.append((value, place))

    def _contain(self, path: str, container: Any) -> None:
        """Note what may change, once."""
        if id(container) not in self._contained:
            self._contained.add(id(container))
            self.snapshot.containers[path] = container

    def _unique(self, name: str) -> str:
        """A name that nothing else has: functions that one line makes have the same one."""
        self._names_used[name] += 1
        return name if self._names_used[name] == 1 else f"{name}#{self._names_used[name]}"

    def _visit(self, value: Any, place: Place) -> None:
        path, kind, entries = self._unique(place.path), type(value), self.snapshot.entries
        if kind in ATOMS:
            entries[path] = (kind, value)
        elif kind in FLOATS:
            entries[path] = (kind, repr(value))  # equal for two NaN, and not for 0.0 and -0.0
        elif isinstance(value, torch.Tensor):
            entries[path] = tensor_token(value)
            self.snapshot.tensors[path] = place
        elif isinstance(value, weakref.ref) and isinstance(value(), torch.Tensor):
            entries[path] = ("reference", self._seen.get(id(value())), tensor_token(value()))
            self.snapshot.references.append(place)
        elif id(value) in self._seen:
            entries[path] = ("same as", self._seen[id(value)])
        else:
            self._seen[id(value)] = path
            self._met.append(value)
            self._object(value, path)

    def _object(self, value: Any, path: str) -> None:
        entries = self.snapshot.entries
        if isinstance(value, nn.Module):
            self._module(value, path)
        elif isinstance(value, dict):
            self._dict(value, path)
        elif isinstance(value, _LISTS):
            entries[path] = (Identity(type(value)), len(value))
            self._items(value, path)
        elif isinstance(value, set | frozenset):
            entries[path] = (Identity(type(value)), frozenset(map(key_token, value)))
            self._contain(path, value)
            self._watch_set(value)
        elif isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            self._callable(value, path)
        elif isinstance(value, functools._lru_cache_wrapper):
            entries[path] = Identity(value)
            self.snapshot.caches.append(value)
            self._attributes(value, path)
            self._add(value.__wrapped__, Place([value.__wrapped__], 0, path))
        elif isinstance(value, property | staticmethod | classmethod | functools.cached_property):
            for name in ("fget", "__func__", "func"):
                function = getattr(value, name, None)
                if function is not None:
                    self._add(function, Place([function], 0, f"{path}.{name}"))
        elif isinstance(value, torch.jit.ScriptFunction):
            raise CaptureError(
                f"{path} is a function of TorchScript, whose operators no capture follows; {_SCRIPT}"
            )
        elif isinstance(value, type):
            entries[path] = Identity(value)
            self._class(value)
        elif isinstance(value, enum.Enum):
            entries[path] = Identity(value)
        elif isinstance(value, int | float | complex | str | bytes):  # of a subclass
            entries[path] = (Identity(type(value)), repr(value))
        elif isinstance(value, types.ModuleType):
            entries[path] = Identity(value)
            if package(value.__name__) not in OPAQUE:
                self._namespace(vars(value), value.__name__, self.names & vars(value).keys())
        elif has_state(value):
            entries[path] = state_token(value)
            self.snapshot.changing.append((path, value))
        elif is_opaque(value):
            entries[path] = Identity(value)
        else:
            entries[path] = ("object", Identity(type(value)))
            self._class(type(value))
            self._attributes(value, path)

    # Containers.

    def _module(self, module: nn.Module, path: str) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(f"{path} is TorchScript, whose operators no capture follows; {_SCRIPT}")
        entries = self.snapshot.entries
        entries[path] = ("module", Identity(type(module)))
        self._class(type(module))
        own = {"_parameters", "_buffers", "_modules", *HOOKS, *_UNREAD}
        if module is self._root:
            own.add("forward")
        self._attributes(module, path, own)
        if id(module) not in self._tree:  # a teacher in a list
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    self._add(tensor, Place(tensors, name, f"{path}.{name}"))
        for name, parameter in (*module._parameters.items(), *module._buffers.items()):
            # Which are the same one; their metadata is in the call's signature.
            first = None if parameter is None else self._seen.setdefault(id(parameter), f"{path}.{name}")
            entries[f"{path}.{name}()"] = ("state", first)
            self._met.append(parameter)
        for held in (module._parameters, module._buffers, module._modules):
            self.snapshot.watch(held, list(held), list(held.values()))
        entries[f"{path}()"] = (*module._parameters, *module._buffers, *module._modules)
        for name, child in module._modules.items():
            if child is None:
                entries[f"{path}.{name}"] = None
            else:
                self._add(child, Place(module._modules, name, f"{path}.{name}"))
        for name in HOOKS:
            hooks = vars(module).get(name)
            # The model's own run around its graph.
            if hooks is not None and module is not self._root:
                self._contain(f"{path}.{name}", hooks)
                self.snapshot.watch(hooks, list(hooks), list(hooks.values()))
                entries[f"{path}.{name}"] = len(hooks)
                for at, (key, hook) in enumerate(hooks.items()):
                    self._add(hook, Place(hooks, key, f"{path}.{name}[{at}]"))

    def _dict(self, value: dict[Any, Any], path: str) -> None:
        self.snapshot.entries[path] = (Identity(type(value)), tuple(map(key_token, dict.keys(value))))
        self._contain(path, value)
        self._watch(value, list(dict.keys(value)))
        for at, (key, item) in enumerate(dict.items(value)):
            name = repr(key) if type(key) in ATOMS else f"#{at}"
            self._add(item, Place(value, key, f"{path}[{name}]"))
        if type(value) is not dict and hasattr(value, "__dict__"):
            self._attributes(value, path)

    def _items(self, value: Any, path: str) -> None:
        tensors = {at for at, item in enumerate(value) if isinstance(item, torch.Tensor)}
        if not isinstance(value, tuple):
            self._contain(path, value)
            self.snapshot.watch(
                value,
                [at for at in range(len(value)) if at not in tensors],
                [item for at, item in enumerate(value) if at not in tensors],
            )
        for at, item in enumerate(value):
            self._add(item, Place(value, at, f"{path}[{at}]"))

    def _watch_set(self, value: Set[Any]) -> None:
        if not isinstance(value, frozenset):
            self.snapshot.watch_items(value)

    def _attributes(self, value: Any, path: str, without: Set[str] = frozenset()) -> None:
        """Visit the attributes of an object that some code may read."""
        everything = self.dynamic or isinstance(value, CONFIGS) or answers_itself(type(value))
        everything = everything or holds_tensors(value)
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            keys = [key for key in held if (everything or key in self.names) and key not in without]
            self.snapshot.entries[f"{path}.*"] = frozenset(keys)
            self._contain(f"{path}.", held)
            self._watch(held, keys)
            for key in keys:
                self._add(held[key], Place(held, key, f"{path}.{key}"))
        beside = [name for name in slots(value) if hasattr(value, name)]
        if beside:
            self._contain(f"{path}.", value)
        for name in beside:
            item = getattr(value, name)
            if not isinstance(item, torch.Tensor):
                self.snapshot.watch_attributes(value, [name])
            self._add(item, Place(value, Slot(name), f"{path}.{name}"))

    def _watch(self, held: Mapping[Any, Any], keys: Sequence[Any]) -> None:
        """Have the calls look at these items of a dict; tensors may be replaced by others of their kind."""
        items = [(key, Place(held, key, "").get()) for key in keys]
        items = [(key, item) for key, item in items if not isinstance(item, torch.Tensor)]
        self.snapshot.watch(held, [key for key, _ in items], [item for _, item in items])

    # Code.

    def _callable(self, value: Any, path: str) -> None:
        if isinstance(value, functools.partial):
            self.snapshot.entries[path] = Identity(type(value))
            for name in ("func", "args", "keywords"):
                self._add(getattr(value, name), Place(value, Slot(name), f"{path}.{name}"))
            return
        if isinstance(value, types.MethodType):
            self.snapshot.entries[path] = ("method", Identity(value.__func__))
            self._add(value.__self__, Place([value.__self__], 0, f"{path}.__self__"))
            function = value.__func__
        else:
            self.snapshot.entries[path] = Identity(value)
            function = value
        if isinstance(function, types.FunctionType):
            self._function(function)

    def _function(self, function: types.FunctionType) -> None:
        """Walk through what a function refers to, unless it is PyTorch's."""
        if id(function) in self._functions or package(function.__module__) in OPAQUE:
            return
        self._functions.add(id(function))
        self._met.append(function)
        name = self._unique(f"{function.__module__}.{function.__qualname__}")
        codes = list(codes_of(function.__code__))
        for code in codes:
            self.names.update(code.co_names)
            self.names.update(constant for constant in code.co_consts if type(constant) is str)
            self.snapshot.codes.append(code)
            if is_users(code.co_filename) and reads_unnamed(code):
                self.dynamic = True
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            place = Place(cell, None, f"{name}.{variable}")
            if (content := place.get()) is not MISSING:
                self._contain(place.path, cell)
                if not isinstance(content, torch.Tensor):
                    self.snapshot.watch_attributes(cell, ["cell_contents"])
                self._add(content, place)
        for at, default in enumerate(function.__defaults__ or ()):
            self._add(default, Place(function.__defaults__, at, f"{name}.__defaults__[{at}]"))
        for key, default in (function.__kwdefaults__ or {}).items():
            self._add(default, Place(function.__kwdefaults__, key, f"{name}.{key}"))
        if vars(function):
            self._attributes(function, name)
        named = {key for code in codes for key in code.co_names}
        self._namespace(function.__globals__, str(function.__module__), named & function.__globals__.keys())
        if not named.isdisjoint({"environ", "getenv"}):
            self._add(os.environ, Place([os.environ], 0, "os.environ"))
        for key in named & sys.modules.keys():  # imported by the function itself
            if is_users(getattr(sys.modules[key], "__file__", None)):
                self._add(sys.modules[key], Place(sys.modules, key, key))

    def _namespace(self, namespace: dict[str, Any], name: str, keys: Set[str]) -> None:
        """Names of a module that code reads."""
        _, _, known = self._globals.setdefault(id(namespace), (name, namespace, {}))
        library = not is_users(_file_of(namespace))
        for key in sorted(keys - known.keys()):
            value = namespace[key]
            known[key] = None
            if library and isinstance(value, types.FunctionType | type):
                self.snapshot.entries[f"{name}.{key}"] = Identity(value)
            elif not isinstance(value, types.ModuleType) or package(value.__name__) not in OPAQUE:
                self._add(value, Place(namespace, key, f"{name}.{key}"))

    def _class(self, owner: type) -> None:
        """Walk through the attributes of a class that some code names, and through the code of its methods."""
        for base in owner.__mro__:
            if (
                base in (object, nn.Module)
                or id(base) in self._globals
                or base.__module__ in ("builtins", "typing")
            ):
                continue
            held, name = vars(base), f"{base.__module__}.{base.__qualname__}"
            keys = [
                key
                for key in held
                if key in self.names and key not in ("__dict__", "__weakref__", "__slots__")
            ]
            self._globals[id(base)] = (name, base, dict.fromkeys(keys))
            self.snapshot.entries[f"{name}.*"] = frozenset(keys)
            for key in keys:
                value = held[key]
                if isinstance(value, types.FunctionType) and package(base.__module__) in OPAQUE:
                    self.snapshot.entries[f"{name}.{key}"] = Identity(value)
                    if package(base.__module__) == "torch":
                        for code in codes_of(value.__code__):
                            self.names.update(code.co_names)
                elif not isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
                    self._add(value, Place(held, key, f"{name}.{key}"))


def _file_of(namespace: Any) -> str | None:
    """The file that a module's names or a class come from; an interactive session has none."""
    if isinstance(namespace, type):
        namespace = vars(sys.modules.get(namespace.__module__, types))
    file = namespace.get("__file__")
    return file or ("<stdin>" if namespace.get("__name__") == "__main__" else None)


ARGUMENTS = "arguments"
"""Path of what arguments of a call hold."""
_UNREAD = ("_is_full_backward_hook", "_non_persistent_buffers_set", "_backward_hooks_cache")
_SCRIPT = "give hp.offload the Python module or function that it was made from"
