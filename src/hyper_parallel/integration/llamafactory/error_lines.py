"""User errors as one line, in place of a traceback from each worker."""

from __future__ import annotations

import functools
import os
import sys
from types import TracebackType

import torch.distributed as dist

from hyper_parallel.compat.process_groups import leave_word, word_left
from hyper_parallel.errors import PREFIX, HyperParallelError

_KEY = "hyper_parallel/error"
_PATIENCE = 10.0
"""Seconds for which a worker waits for rank 0 to say the same, before it speaks for itself."""


def one_line_errors() -> None:
    """From now on a HyperParallelError that ends this process is one line on standard error, of rank 0 if it has it.

    Other errors are shown as they were.
    """
    if getattr(sys.excepthook, "func", None) is not _hook:
        sys.excepthook = functools.partial(_hook, sys.excepthook)


def _hook(
    before: object, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if not isinstance(error, HyperParallelError):
        assert callable(before)
        before(kind, error, trace)
        return
    text = " ".join(str(error).split())
    rank, together = int(os.environ.get("RANK", "0")), dist.is_available() and dist.is_initialized()
    if rank and together and word_left(_KEY, _PATIENCE) == text:
        return
    line = f"{PREFIX}rank {rank}: {text}" if rank else f"{PREFIX}{text}"
    print(line, file=sys.stderr, flush=True)  # noqa: T201
    if not rank and together:
        leave_word(_KEY, text)
