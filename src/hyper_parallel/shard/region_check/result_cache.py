"""Cache of checks on disk, by digest: region checks that passed, and what owner checks found.

`$XDG_CACHE_HOME/hyper-parallel/checks`, else under `~/.cache`. Of a region check a file's presence is the verdict, and
its text is for people: only what is right is kept, and what is refused is computed again. Of an owner check the text is
the verdict. Everything is computed again when the model's code, this package's, PyTorch or Transformers change.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from importlib import metadata
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from hyper_parallel.graph.likeness import signature
from hyper_parallel.shard.lora_adapters import without_adapters
from hyper_parallel.shard.model_structure import is_transformers
from hyper_parallel.shard.region_check.outcome import SampleCall
from hyper_parallel.strategy import Strategy

_known: dict[str, str] = {}


_digests: ContextVar[dict[int, str] | None] = ContextVar("digests", default=None)


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """Inside, no model changes: each is looked at once, however many checks are made of it."""
    token = _digests.set({} if _digests.get() is None else _digests.get())
    try:
        yield
    finally:
        _digests.reset(token)


def digest(model: nn.Module, strategy: Strategy, call: SampleCall | None) -> str:
    """The digest of the model's code and shapes, the strategy, the call, and the versions."""
    parts = [
        _own_code(),
        torch.__version__,
        call.described() if call is not None else "",
        strategy.model_dump_json(
            exclude={"placement", "cluster", "tries", "tries_seconds", "overlap", "precision"}
        ),
        _digest_of_model(model),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _digest_of_model(model: nn.Module) -> str:
    known = _digests.get()
    if known is not None and id(model) in known:
        return known[id(model)]
    core: Any = without_adapters(model)
    parts = sorted({f"{type(part).__module__}.{type(part).__qualname__}" for part in model.modules()})
    modules = {base.__module__ for part in model.modules() for base in type(part).__mro__}
    parts.append(signature(model, modules))
    parts += sorted(map(_code_of, _with_helpers(modules)))
    if is_transformers(model):
        parts += [metadata.version("transformers"), core.config.to_json_string(use_diff=False)]
    text = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    if known is not None:
        known[id(model)] = text
    return text


def passed(key: str) -> bool:
    """Whether this check passed before, in this process or another."""
    return key in _known or (_folder() / key).is_file()


def cached_text(key: str) -> str | None:
    """The text that was kept of a check, by this process or another."""
    if key not in _known:
        try:
            _known[key] = (_folder() / key).read_text().rstrip("\n")
        except OSError:
            return None
    return _known[key]


def keep(key: str, text: str) -> None:
    """Keep the text of a check. A folder that cannot be written keeps it in this process only."""
    _known[key] = text
    try:
        _folder().mkdir(parents=True, exist_ok=True)
        (_folder() / key).write_text(text + "\n")
    except OSError:
        return


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hyper-parallel" / "checks"


@functools.cache
def _own_code() -> str:
    """Digest of this package's code that puts strategies into effect."""
    root = Path(__file__).parents[2]
    found = hashlib.sha256()
    for folder in ("shard", "compat", "layout"):
        for path in sorted((root / folder).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


def _with_helpers(modules: Iterable[str]) -> set[str]:
    """Modules, and those of the user's own that they take functions, classes and modules from."""
    left, found = set(modules), set[str]()
    while left:
        module = left.pop()
        found.add(module)
        if _is_own(module):
            for value in vars(sys.modules[module]).values():
                other = value.__name__ if isinstance(value, ModuleType) else None
                if isinstance(value, type | FunctionType):
                    other = value.__module__
                if other is not None and other not in found and _is_own(other):
                    left.add(other)
    return found


@functools.cache
def _is_own(module: str) -> bool:
    """Whether a module is the user's own: of no installed package, nor of Python or this package."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return isinstance(file, str) and not file.startswith(_INSTALLED)


_INSTALLED = (
    *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[2]),
)


@functools.cache
def _code_of(module: str) -> str:
    """Digest of a module's file; its name where there is none."""
    if module.startswith("torch."):
        return module
    try:
        path = inspect.getsourcefile(sys.modules[module])
        return module + hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else module
    except (KeyError, OSError, TypeError):
        return module
