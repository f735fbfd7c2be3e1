"""The digest of everything that decides a captured step.

    key = blake2b(versions, code, settings of PyTorch, model before any strategy, recipe, shape, passes, rank)

The model is described by content: classes by their names, what their instances hold as plain data, functions by their
names; what these names stand for, `code_digest` says. What cannot be described so, such as a lambda, or a class of
`__main__` or of a function's body, has no digest, and the step is not cached (`NoDigest`).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import os
import platform
import site
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

from hyper_parallel._version import __version__
from hyper_parallel.compat.dispatch import device_facts, kernel_settings
from hyper_parallel.graph import Pass
from hyper_parallel.graph.step_context import StepContext, current_step
from hyper_parallel.step.capture_train_step import BatchShape
from hyper_parallel.step.recipe import Recipe

_ENVIRONMENT = ("TORCH_", "PYTORCH_", "HF_", "TRANSFORMERS_")


def key_of(
    recipe: Recipe, shape: BatchShape, device: torch.device, passes: Sequence[Pass], whole: bool
) -> str:
    """32 hexadecimal digits; steps with the same have the same graph. Raises NoDigest."""
    handle = recipe.handle
    if current_step() != StepContext():
        raise NoDigest("the step is captured as a part of another computation")
    if recipe.inputs:
        raise NoDigest("the loss is another one than next-token prediction's")
    if handle.skeleton is None or handle.pipeline is not None:
        raise NoDigest("the model has values or is cut into stages")
    optimizer = recipe.optimizer
    content = {
        "versions": versions(),
        "code": names(),
        "settings": [kernel_settings(), environment()],
        "model": described(handle.skeleton),
        "trained": [[name, one.requires_grad] for name, one in recipe.model.named_parameters()],
        "strategy": described(handle.strategy),
        "plan": described(handle.plan),
        "cluster": described(handle.axes.cluster),
        "recipe": [recipe.seed, described(recipe.loss), recipe.clip, recipe.router_bias_rate],
        "optimizer": [_class(type(optimizer)), described(optimizer.config)],
        "shape": described(shape),
        "device": [str(device), *device_facts(device)],
        "passes": [[one.name, described(getattr(one, "cluster", None))] for one in passes],
        "whole": whole,
        "rank": [handle.rank, sorted(handle.coordinate.items())],
    }
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def described(value: Any) -> Any:
    """A value as plain data, the same for values of the same content. Raises NoDigest."""
    return _Description().of(value)


class _Description:
    """Describes objects, each once: one that comes again, or that holds itself, is referred to by its number."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, Any]] = {}

    def of(self, value: Any) -> Any:
        if value is None or (isinstance(value, bool | int | str) and not isinstance(value, enum.Enum)):
            return value
        if isinstance(value, float):
            return value.hex()
        if isinstance(value, enum.Enum):
            return [_class(type(value)), value.name]
        if isinstance(value, _PLAIN):
            return str(value)
        if isinstance(value, type):
            return _class(value)
        if isinstance(value, list | tuple):
            return [type(value).__name__, *map(self.of, value)]
        if id(value) in self._seen:
            return ["seen", self._seen[id(value)][0]]
        self._seen[id(value)] = len(self._seen), value  # kept, so that no other object gets its number
        return self._object(value)

    def _object(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return ["tensor", str(value.dtype), list(value.shape), value.requires_grad, _content(value)]
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, Mapping):
            return ["mapping", *([self.of(key), self.of(one)] for key, one in value.items())]
        if isinstance(value, Set):
            return ["set", *sorted(map(self.of, value), key=json.dumps)]
        if isinstance(value, functools.partial):
            return ["partial", self.of(value.func), self.of(value.args), self.of(value.keywords)]
        if hasattr(value, "__self__") and hasattr(value, "__func__"):
            return ["method", _function(value.__func__), self.of(value.__self__)]
        if callable(value) and hasattr(value, "__qualname__"):
            return _function(value)
        if hasattr(value, "model_dump"):
            return [_class(type(value)), self.of(value.model_dump())]
        if dataclasses.is_dataclass(value) and type(value).__module__.startswith("hyper_parallel."):
            # Its fields alone, without what it has computed from them so far.
            fields = [
                [field.name, self.of(getattr(value, field.name))] for field in dataclasses.fields(value)
            ]
            return [_class(type(value)), fields]
        if hasattr(value, "__dict__"):
            held = {name: one for name, one in vars(value).items() if name not in _OF_THE_PROCESS}
            return [_class(type(value)), self.of(held)]
        raise NoDigest(f"an object of {type(value).__module__}.{type(value).__qualname__} has no digest")

    def _module(self, module: nn.Module) -> list[Any]:
        """A module by its class, what it holds, and its modules, parameters and buffers."""
        own = {name: one for name, one in vars(module).items() if name not in _REGISTERED}
        tensors = [
            [name, None if one is None else [str(one.dtype), list(one.shape), one.requires_grad]]
            for held in (module._parameters, module._buffers)
            for name, one in held.items()
        ]
        modules = [[name, self.of(one)] for name, one in module._modules.items()]
        return [
            _class(type(module)),
            self.of(own),
            tensors,
            sorted(module._non_persistent_buffers_set),
            modules,
        ]


_OF_THE_PROCESS = ("_original_object_hash",)
"""What Transformers' generation configs hold and no other process has: a hash by a seed of the process."""
_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format, Path)
_REGISTERED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def _class(kind: type) -> list[str]:
    """A class and those that it inherits from, by name."""
    return [_named(one, "class") for one in kind.__mro__ if one.__module__ != "builtins"]


def _function(function: Any) -> list[Any]:
    defaults = getattr(function, "__closure__", None)
    if defaults:
        raise NoDigest(
            f"the function {function.__qualname__} of {function.__module__} holds values of its own"
        )
    return ["function", _named(function, "function")]


def _named(one: Any, what: str) -> str:
    module, name = getattr(one, "__module__", None), one.__qualname__
    if module == "__main__" or "<" in name:
        raise NoDigest(f"the {what} {name} of {module} has no source that another process can compare")
    return f"{module}.{name}"


def _content(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return ""
    values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(values.numpy().tobytes(), digest_size=16).hexdigest()


def environment() -> list[list[str]]:
    """Variables that PyTorch and Transformers read."""
    return sorted(
        [name, value]
        for name, value in os.environ.items()
        if name.startswith(_ENVIRONMENT) and not name.startswith("TORCH_ELASTIC")
    )


# The code that this process has loaded, as digests: its files, and what its names stand for.
#
# A captured step is what loaded code made of a model. `sources` are the files outside of Python, PyTorch and this
# package, which have versions: a file of the user's by its content, one of an installed package by its size and time. A
# file that is younger than this process may be another one than the code that runs, and has no digest (`NoDigest`).
# `names` also sees functions and methods that were exchanged while the process ran.

_BEGUN = time.time()
_PACKAGE = Path(__file__).resolve().parents[1]
_ALSO = ("torch.nn.functional", "torch._tensor")
"""Modules of PyTorch whose functions others exchange."""


class NoDigest(Exception):
    """Something that decides a step cannot be digested; the text says what."""


def sources() -> dict[str, str]:
    """Each file that code of this process was loaded from to its digest. Raises NoDigest."""
    return {file: source_digest(file, young=False) for _, file, _ in _modules()}


def source_digest(file: str, *, young: bool = True) -> str:
    """Of a file; "" where there is none. `young`: it may be younger than this process; else NoDigest is raised."""
    try:
        status = os.stat(file)
        if not young and status.st_mtime >= _BEGUN:
            raise NoDigest(f"{file} has changed since this process began")
        if file.startswith(_INSTALLED):
            return f"{status.st_size} {status.st_mtime_ns}"
        return hashlib.blake2b(Path(file).read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return ""


def names() -> str:
    """A digest of the functions and methods that the names of all loaded modules stand for."""
    digest = hashlib.blake2b(digest_size=16)
    for name, _, content in (*_modules(), *((one, "", vars(sys.modules[one])) for one in _ALSO)):
        rows = [name]
        for key, one in sorted(content.items()):
            rows += _code(key, one)
            if isinstance(one, type) and one.__module__ == name:
                for inner, held in sorted(vars(one).items()):
                    rows += _code(f"{key}.{inner}", held)
        digest.update("\n".join(rows).encode())
    return digest.hexdigest()


@functools.cache
def versions() -> tuple[str, ...]:
    """Of Python, PyTorch, Transformers and this package, whose files are digested too. Raises NoDigest."""
    import transformers

    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(_PACKAGE.rglob("*.py")):
        if file.stat().st_mtime >= _BEGUN:
            raise NoDigest(f"{file} has changed since this process began")
        digest.update(f"{file.relative_to(_PACKAGE)} ".encode() + file.read_bytes())
    own = (__version__, digest.hexdigest(), torch.__version__, str(torch.version.git_version))
    return (*own, str(transformers.__version__), platform.python_version(), platform.machine())


def _code(name: str, one: Any) -> list[str]:
    """Where a function comes from."""
    # Asked by its type alone: an attribute of what merely stands for a missing package is an error.
    function = one
    if isinstance(one, staticmethod | classmethod):
        function = one.__func__
    elif isinstance(one, property):
        function = one.fget
    elif isinstance(one, functools.partial | functools.cached_property):
        function = one.func
    if not isinstance(function, FunctionType):
        return []
    code = function.__code__
    return [f"{name} {code.co_filename}:{code.co_firstlineno} {code.co_qualname}"]


def _modules() -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Name, file and content of each loaded module outside of Python, PyTorch and this package."""
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and not file.startswith(_ELSEWHERE):
            yield name, file, vars(module)


def _folders() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(installed packages; Python itself, PyTorch and this package), as they begin files' names."""
    installed = {*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    python = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    known = tuple(f"{folder}{os.sep}" for folder in installed)
    own = [f"{Path(torch.__file__).parent}{os.sep}", f"{_PACKAGE}{os.sep}"]
    # The folder of installed packages may lie inside of that of Python, which then says nothing by itself.
    own += [f"{folder}{os.sep}{part}" for folder in python for part in _parts(folder, known)]
    return known, tuple(own)


def _parts(folder: str, installed: tuple[str, ...]) -> list[str]:
    """What is in the folder of Python's library, but for installed packages."""
    try:
        found = os.listdir(folder)
    except OSError:
        return []
    return [
        one for one in found if not any(known.startswith(os.path.join(folder, one)) for known in installed)
    ]


_INSTALLED, _ELSEWHERE = _folders()
