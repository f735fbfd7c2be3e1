"""Files of JSON objects, one a line, each with its `step`: `metrics.jsonl`, which every run writes, and its like.

A step stands in a file once, also after a resume. A line that is no record (cut off by a crash, or bytes of a disk's
making) is skipped by the reader and gone after the next resume: it blocks no run.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hyper_parallel.checkpoint.durable import explain, publish
from hyper_parallel.untrusted_files import open_regular, open_to_append


def records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The records of a file, each with its line; none if the file is missing.

    Raises CheckpointError for what is no regular file, or cannot be read.
    """
    try:
        with open_regular(path) as file:
            lines = file.readall().split(b"\n")
    except FileNotFoundError:
        return
    except OSError as error:
        raise explain(error, path, "read") from error
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # not JSON, or not UTF-8
            continue
        if isinstance(record, dict) and type(record.get("step")) is int:
            yield line + b"\n", record


class RecordFile:
    """Appends a line for each record."""

    def __init__(self, path: Path, start: int, *, texts: bool = True) -> None:
        """Keep what was recorded of steps up to `start`, of a run that begins anew nothing. `texts`: also records with
        text, such as the sample at the end, which a run that goes on writes again.
        """
        self.path = path
        kept = [
            line
            for line, record in (records(path) if start else ())
            if record["step"] <= start
            and (texts or not any(isinstance(value, str) for value in record.values()))
        ]
        # Replaced whole, so that a crash here loses nothing.
        publish(path, b"".join(kept))
        self._file = open(open_to_append(path), "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the run

    def write(self, *rows: Mapping[str, Any]) -> None:
        """Append records, flushed at once so that the file can be followed. Raises OSError, and CheckpointError if the
        file was removed: what is written to it then would be lost without a word.
        """
        if not self.path.exists():
            raise explain(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)), self.path)
        self._file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class MetricsFile:
    """`metrics.jsonl` in the run's folder, as a tracker."""

    def __init__(self, run: RunInfo) -> None:
        self.path = run.out / "metrics.jsonl"
        self._file = RecordFile(self.path, run.start, texts=False)

    def log(self, step: int, record: Record) -> None:
        """One line; a value that is not finite is written as null, which JSON can hold."""
        values = {name: value if math.isfinite(value) else None for name, value in record.items()}
        self._file.write({"step": step, **values})

    def text(self, step: int, name: str, text: str) -> None:
        """One line with the text under its name."""
        self._file.write({"step": step, name: text})

    def close(self) -> None:
        """Close the file."""
        self._file.close()


Record = Mapping[str, float]
"""Metric name to value. A step's holds `loss`, an evaluation's `eval_loss`; docs/training.md lists all."""


@dataclass(frozen=True)
class RunInfo:
    """The facts of a run that a tracker is opened with."""

    out: Path
    """The run's folder."""
    config: dict[str, Any]
    """The run file as JSON-able values."""
    start: int
    """The number of steps done when the run starts or resumes: what was recorded of later steps is void."""


class Tracker(Protocol):
    """Keeps one run's metrics."""

    def log(self, step: int, record: Record) -> None:
        """Keep a record of the state after `step` updates."""
        ...

    def text(self, step: int, name: str, text: str) -> None:
        """Keep a text, for example the sample that the model wrote."""
        ...

    def close(self) -> None:
        """Write what is still held back."""
        ...


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, step: int, record: Record) -> None:
        """Keep the record in each."""
        for tracker in self._trackers:
            tracker.log(step, record)

    def text(self, step: int, name: str, text: str) -> None:
        """Keep the text in each."""
        for tracker in self._trackers:
            tracker.text(step, name, text)

    def close(self) -> None:
        """Close each, in the order in which they were opened."""
        for tracker in self._trackers:
            tracker.close()
