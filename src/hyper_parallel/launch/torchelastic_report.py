"""torchrun's own report of a worker that refused a run: the reason, and no workers that only waited.

torchrun (torch.distributed.elastic) prints a table of all workers that ended with another exit code than 0, and a
traceback of itself; a worker cannot prevent either. It can give the reason that the table shows, through the file that
TORCHELASTIC_ERROR_FILE names, and keep workers out of it that torchrun ended and that have nothing to say.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from types import FrameType

_FILE = "TORCHELASTIC_ERROR_FILE"
_RUN = "TORCHELASTIC_RUN_ID"
OTHERS_S = 1.0
"""Seconds by which workers of one machine start apart, at most, as a rule."""


def report_reason(text: str) -> None:
    """Have torchrun's report show `text` for this worker. Without torchrun, nothing."""
    path = os.environ.get(_FILE)
    if not path or _RUN not in os.environ:
        return
    data = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}
    # A report that cannot be written is no reason for another error.
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump(data, file)


def let_others_come() -> None:
    """Wait under torchrun, after the reason is said, until the other workers of this machine will have come to the same
    error and `leave_quietly`."""
    if _RUN in os.environ and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        time.sleep(OTHERS_S)


def leave_quietly() -> None:
    """From now on SIGTERM ends this worker with exit code 0 under torchrun: another worker has failed, which decides
    torchrun's exit code, and this one waited for it to say why. Nothing without torchrun, or in a thread."""
    if _RUN in os.environ and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _left)


def _left(number: int, frame: FrameType | None) -> None:
    os._exit(0)
