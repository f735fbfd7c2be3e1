"""Capture errors: the operator, the module and the line of the user's code that stopped a capture."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from hyper_parallel.compat.fake_tensors import asks_for_values, has_no_fake_kernel, has_unknown_shape
from hyper_parallel.errors import CaptureError

_NOT_THEIRS = ("hyper_parallel", "torch", "transformers")
_STANDARD = sysconfig.get_path("stdlib")
Call = tuple[FrameType, int]
"""A call on the way to an error, outermost first: its frame, and the line that it had come to."""


def explained(error: Exception, operator: str, module: str, names: Mapping[nn.Module, str]) -> CaptureError:
    """The error that tells why a step could not be captured.

    `operator`: the last one that was dispatched. `module`: the name of the module to which that one belongs, used where
    no module of `names` is on the stack of `error`.
    """
    calls = list(traceback.walk_tb(error.__traceback__))
    line = _blamed(calls)
    running = next((names[m] for m in _modules(calls) if m in names), module)
    where = [f"at {line}"] if line else []
    where += [f"in module {running!r}"] if running else []
    return CaptureError(
        f"the step cannot be captured{' ' + ', '.join(where) if where else ''}: {_reason(error, operator)}"
    )


def _reason(error: Exception, operator: str) -> str:
    if isinstance(error, CaptureError):
        return str(error)
    last = f" (the last operator was {operator})" if operator else ""
    if asks_for_values(error):
        return (
            "it asks for a tensor's value, which is not there before the step runs, as `if`, `bool()`, `.item()` and a "
            f"loop over a tensor do{last}; compute it with tensors, torch.where for example"
        )
    if has_unknown_shape(error):
        return f"the shape of what {operator} gives depends on values that are not there before the step runs"
    if has_no_fake_kernel(error):
        return (
            f"{operator} has no kernel for tensors without values; register one (torch.library.register_fake)"
        )
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}{last}"


def _blamed(calls: Sequence[Call]) -> str | None:
    """The innermost line that the user wrote, else the innermost of Transformers' code."""
    places = [(frame.f_code.co_filename, line) for frame, line in calls]
    theirs = [place for place in places if _is_users(place[0])]
    models = [place for place in places if "/transformers/models/" in place[0].replace("\\", "/")]
    found = theirs or models or [place for place in places if _is_of("transformers", place[0])]
    if not found:
        return None
    file, line = found[-1]
    text = linecache.getline(file, line).strip()
    return f"{file}:{line}" + (f" (`{text}`)" if text else "")


def _is_users(file: str) -> bool:
    if file.startswith("<"):
        return False
    return not (
        any(_is_of(package, file) for package in _NOT_THEIRS)
        or (file.startswith(_STANDARD) and "site-packages" not in file)
    )


def _is_of(package: str, file: str) -> bool:
    # Both as they were imported: a link on the way to a package is in the names of its frames too.
    root: Any = getattr(sys.modules.get(package), "__file__", None)
    return root is not None and file.startswith(str(Path(root).parent))


def _modules(calls: Sequence[Call]) -> Iterator[nn.Module]:
    """The modules whose methods were running, innermost first."""
    for frame, _ in reversed(calls):
        running = frame.f_locals.get("self")
        if isinstance(running, nn.Module):
            yield running
