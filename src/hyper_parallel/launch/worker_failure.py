"""Worker failures: their kinds, the root cause, the message to show, and the steps that are lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hyper_parallel.config.launch import Launched
from hyper_parallel.errors import PREFIX, FaultError, FollowsError, HyperParallelError
from hyper_parallel.launch.logs import path_of
from hyper_parallel.untrusted_files import open_regular

_NO_LOG = "logs=FOLDER keeps the logs of the workers"

Kind = Literal["error", "fault", "crash", "lost", "died"]


@dataclass(frozen=True)
class Failure:
    """One worker's end.

    `error` is a HyperParallelError (text: its line), `fault` a FaultError (the same), `crash` any other exception
    (text: the traceback), `lost` a consequence of another rank's end (text: the exception), `died` an end without a
    message (text: the exit status). `time` is on the machine's monotonic clock, comparable between processes.
    """

    rank: int
    kind: Kind
    text: str
    time: float

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """The failure that an exception is. Called where it was caught."""
        from hyper_parallel.compat import is_lost_peer

        if isinstance(error, HyperParallelError) and not isinstance(error, FollowsError):
            kind: Kind = "fault" if isinstance(error, FaultError) else "error"
            return cls(rank, kind, one_line(str(error)), time.monotonic())
        if isinstance(error, FollowsError) or is_lost_peer(error):
            words = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
            return cls(rank, "lost", one_line(words), time.monotonic())
        text = "".join(traceback.format_exception(error)).rstrip()
        return cls(rank, "crash", text, time.monotonic())

    @classmethod
    def of_exit(cls, rank: int, status: int) -> Failure:
        """The failure that an exit status is, as `os.waitstatus_to_exitcode` gives it."""
        if status == -signal.SIGKILL:
            how = "was killed by SIGKILL (out of memory, or by hand)"
        elif status < 0:
            known = -status in set(signal.Signals)
            how = f"died of {signal.Signals(-status).name if known else f'signal {-status}'}"
        else:
            how = f"exited with code {status} without saying why"
        return cls(rank, "died", how, time.monotonic())

    def within(self, position: str, others: str) -> Failure:
        """The same end, with the position in a schedule at which it came, and those of the other ranks."""
        return replace(self, text="; ".join(filter(None, (f"{self.text} {position}", others))))

    @property
    def exit_code(self) -> int:
        """Exit code: 2 for user errors, 1 for all others."""
        return 2 if self.kind == "error" else 1

    def render(self, config: Launched) -> str:
        """The text for the terminal, without a trailing newline: one line, except for a crash's traceback."""
        log = path_of(config.out, self.rank)
        its_log = f"its log: {log}" if config.keeps_logs else _NO_LOG
        if self.kind in ("error", "fault"):
            return f"{PREFIX}{self.text}"
        if self.kind == "crash":
            return f"worker {self.rank} failed ({its_log}):\n{self.text}"
        if self.kind == "lost":
            where = f"see the logs in {log.parent}" if config.keeps_logs else _NO_LOG
            return (
                f"{PREFIX}worker {self.rank} lost the other workers, and none on this machine says why "
                f"({self.text}); {where}"
            )
        return (
            f"{PREFIX}worker {self.rank} {self.text}; the other workers were ended; {config.wording.resume}; "
            f"{its_log}"
        )


def cause(failures: Sequence[Failure]) -> Failure | None:
    """The root failure: the earliest that is not a consequence of another."""
    ordered = sorted(failures, key=lambda failure: failure.time)
    return next((failure for failure in ordered if failure.kind != "lost"), ordered[0] if ordered else None)


SETTLE_S = 3.0
"""Seconds that a lost connection waits for the failure that explains it, and a rank's error for the other ranks."""


def settles_at(failures: Sequence[Failure]) -> float:
    """When the first failure has waited long enough for others, on the clock of their times."""
    return min(failure.time for failure in failures) + SETTLE_S


def one_line(text: str) -> str:
    """Text with its lines joined by blanks."""
    return " ".join(text.split())


# Lost steps: the steps that an aborted run loses since its last checkpoint, and how to resume.
#
# They are read from the run's folder, so that they are known however the run ended.

_TAIL = 1 << 16
"""Bytes at the end of the metrics file that contain the last step."""


def watch_steps(out: str | Path) -> Callable[[], str | None]:
    """Called before a run; the returned function describes the loss in one line after the run. It returns None if
    nothing is lost, or if the run has done no step.
    """
    metrics = Path(out) / "metrics.jsonl"
    before = _mark(metrics)

    def lost() -> str | None:
        done = _last_step(metrics) if _mark(metrics) != before else None
        return None if done is None else _lost(Path(out), done)

    return lost


def _lost(out: Path, done: int) -> str | None:
    from hyper_parallel.checkpoint import file_format, verify

    folder = out / "checkpoints"
    with contextlib.suppress(OSError):
        for name in file_format.committed(folder):
            if verify.reason_to_pass_over(folder / str(name)) is not None:
                continue
            if name.step >= done:
                return None
            count = f"the {done - name.step} steps" if done - name.step > 1 else "the step"
            return (
                f"hyper-parallel: lost: {count} since {folder / str(name)}, the newest checkpoint; step {done} was "
                "the last one done. The same command goes on from there; checkpoint.every sets how much can be lost"
            )
    return (
        f"hyper-parallel: lost: all {done} steps, since there is no checkpoint to go on from in {folder}; "
        "checkpoint.every sets how much can be lost"
    )


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _last_step(path: Path) -> int | None:
    """The last step whose update is recorded."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.readall().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            record = json.loads(line)
            if "loss" in record:
                return int(record["step"])
    return None
