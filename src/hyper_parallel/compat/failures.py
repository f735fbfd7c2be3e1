"""Telling the failure that began it from those that follow."""

from __future__ import annotations

import re

import torch.distributed as dist

# gloo raises a bare RuntimeError, which only its text tells from others.
_LOST = re.compile(
    r"gloo/|connection (was )?(closed|reset|refused)|connection lost|broken pipe"
    r"|nccl communicator was aborted|remote process exited|socket timeout|hccl.*(timeout|abort)",
    re.IGNORECASE,
)


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
