"""Capture errors: the operator, the module and the line of the user's code that stopped a capture."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from torch import nn

from hyper_parallel.compat.fake_tensors import asks_for_values, has_no_fake_kernel, has_unknown_shape
from hyper_parallel.errors import CaptureError

_NOT_THEIRS = ("hyper_parallel", "torch", "transformers")
_STANDARD = sysconfig.get_path("stdlib")


def explained(error: Exception, operator: str, module: str, names: Mapping[nn.Module, str]) -> CaptureError:
    """The error that tells why a step could not be captured.

    `operator`: the last one that was dispatched. `module`: the name of the module to which that one belongs, used where
    no module of `names` is on the stack of `error`.
    """
    frames = list(_frames(error.__traceback__))
    line = _blamed(frames)
    running = next((names[m] for m in _modules(frames) if m in names), module)
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


@dataclass(frozen=True)
class _Frame:
    """One call on the way to an error."""

    file: str
    line: int
    code: FrameType

    @property
    def shown(self) -> str:
        """File, line and the text of it."""
        text = linecache.getline(self.file, self.line).strip()
        return f"{self.file}:{self.line}" + (f" (`{text}`)" if text else "")


def _frames(traceback: TracebackType | None) -> Iterator[_Frame]:
    """Outermost first."""
    while traceback is not None:
        yield _Frame(
            traceback.tb_frame.f_code.co_filename,
            traceback.tb_lineno,
            traceback.tb_frame,
        )
        traceback = traceback.tb_next


def _blamed(frames: list[_Frame]) -> str | None:
    """The innermost line that the user wrote, else the innermost of Transformers' code."""
    theirs = [frame for frame in frames if _is_users(frame.file)]
    models = [frame for frame in frames if "/transformers/models/" in frame.file.replace("\\", "/")]
    found = theirs or models or [frame for frame in frames if _is_of("transformers", frame.file)]
    return found[-1].shown if found else None


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


def _modules(frames: list[_Frame]) -> Iterator[nn.Module]:
    """The modules whose methods were running, innermost first."""
    for frame in reversed(frames):
        running = frame.code.f_locals.get("self")
        if isinstance(running, nn.Module):
            yield running
