"""Reward functions: their signature, and how a run file names them.

A reward function is `reward(prompt, answer, task) -> float`. `prompt` is a text or a list of chat messages, `answer`
the text that the policy generated, `task` the row of the task file, which holds what the function needs: a reference
answer (`answer`), tests (`tests`) and so on.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

from hyper_parallel.errors import ConfigError, nearest

Prompt = str | Sequence[Mapping[str, Any]]
"""A text, or chat messages: mappings with `role` and `content`."""
RewardFunction = Callable[[Prompt, str, Mapping[str, Any]], float]

BUILTIN = {
    "code": "hyper_parallel.rl.rewards.program_tests:code",
    "exact_match": "hyper_parallel.rl.rewards.answer_match:exact_match",
    "math": "hyper_parallel.rl.rewards.answer_match:math_expression",
}
"""Names of the verifiers to the functions."""


@dataclass(frozen=True, kw_only=True)
class Reward:
    """What a reward function gave for one sample."""

    value: float | None
    """None when it failed."""
    failed: str | None = None
    """Why there is no value, in one line."""
    seconds: float = 0.0
    """Wall time in the worker, or until it was killed."""


def load_reward(
    name: str, folder: str | Path | None = None, options: Mapping[str, Any] | None = None
) -> RewardFunction:
    """The reward function of a name: `exact_match`, `math`, `code`, `package.module:function` or `file.py:function`.

    `folder`: of the run file, where relative files and modules are looked for first. `options`: further keyword
    arguments of each call, such as the `isolation` of `code`. Imports the user's code. Raises ConfigError, in one line,
    for a name without a function and for an option that the function does not take.
    """
    function: RewardFunction = with_options(
        load_callable(name, "a reward", BUILTIN, folder), name, options or {}, 3
    )
    return function


def load_callable(name: str, what: str, builtin: Mapping[str, str], folder: str | Path | None = None) -> Any:
    """What a name stands for: one of `builtin`, or `module:attribute`, where the module may be a file. `what`: the
    noun of the error message. Raises ConfigError.
    """
    module_name, colon, attribute = builtin.get(name, name).rpartition(":")
    if not colon or not module_name or not attribute:
        known = ", ".join(sorted(builtin))
        raise ConfigError(
            f"unknown name of {what}: {name!r}{nearest(name, builtin)}; it is one of {known}, or "
            "package.module:function, or file.py:function"
        )
    try:
        module = _module(module_name, Path(folder or "."))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{what}, {name!r}, cannot be imported: {_line(error)}; mend {module_name}"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        callables = [
            key for key, value in vars(module).items() if callable(value) and not key.startswith("_")
        ]
        raise ConfigError(
            f"{module_name} has no function {attribute!r} for {what}{nearest(attribute, callables)}; define it there"
        )
    return found


def with_options(function: Any, name: str, options: Mapping[str, Any], arguments: int) -> Any:
    """`function` with `options` bound, checked against its signature after a number of positional `arguments`."""
    if not options:
        return function
    try:
        signature(function).bind(*[None] * arguments, **options)
    except TypeError as error:
        raise ConfigError(
            f"the options of {name!r}, {dict(options)}, do not fit it: {error}; mend them"
        ) from error
    except ValueError:  # a function in C without a signature
        pass
    return partial(function, **options)


def _module(name: str, folder: Path) -> ModuleType:
    folder = folder.absolute()
    if not name.endswith(".py"):
        with _first_on_path(folder):
            return importlib.import_module(name)
    path = folder / name
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; a reward is written file.py:function, next to the run file")
    # Under a name of its own: the same file is imported once, and no installed module is hidden.
    key = "hyper_parallel_user_" + "".join(c if c.isalnum() else "_" for c in str(path))
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[key] = importlib.util.module_from_spec(spec)
    try:
        with _first_on_path(path.parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[key]
        raise
    return module


class _first_on_path:
    """Modules beside the user's file are found while it is imported."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def __enter__(self) -> None:
        sys.path.insert(0, self._folder)

    def __exit__(self, *_: object) -> None:
        sys.path.remove(self._folder)


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
