"""The code that this process has loaded, as digests: its files, and what its names stand for.

A captured step is what loaded code made of a model. `sources` are the files outside of Python, PyTorch and this
package, which have versions: a file of the user's by its content, one of an installed package by its size and time. A
file that is younger than this process may be another one than the code that runs, and has no digest (`NoDigest`).
`names` also sees functions and methods that were exchanged while the process ran.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import site
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from hyper_parallel._version import __version__

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
