"""Classification of exceptions whose class does not say what failed."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist

# gloo raises a bare RuntimeError, which only its text tells from others.
_LOST = re.compile(
    r"gloo/|connection (was )?(closed|reset|refused)|connection lost|broken pipe"
    r"|nccl communicator was aborted|remote process exited|socket timeout|hccl.*(timeout|abort)",
    re.IGNORECASE,
)

_FULL = re.compile(r"can't allocate memory|out of memory", re.IGNORECASE)


def is_lost_peer(error: BaseException) -> bool:
    """Whether `error` is what a rank sees when *another* rank has gone, or never came."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError):
            return True
        if isinstance(seen, (RuntimeError, ConnectionError)) and _LOST.search(str(seen)):
            return True
        seen = seen.__cause__
    return False


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's memory, or the host's, ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # The host's allocator raises a bare RuntimeError; back ends outside of PyTorch say it in words of their own.
    return isinstance(error, RuntimeError) and _FULL.search(str(error)) is not None
