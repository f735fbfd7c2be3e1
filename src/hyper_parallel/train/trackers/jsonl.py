"""`metrics.jsonl`: a JSON object a line, with `step`; a step stands in it once, also after a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path

from hyper_parallel.checkpoint.durable import publish
from hyper_parallel.train.trackers.tracker import Record, RunInfo


class MetricsFile:
    """Appends a line for each record, flushed at once so that the file can be followed."""

    def __init__(self, run: RunInfo) -> None:
        self.path = run.out / "metrics.jsonl"
        kept = _lines_up_to(self.path, run.start)
        # Replaced whole, so that a crash here loses nothing.
        publish(self.path, "".join(kept).encode())
        self._file = self.path.open("a", encoding="utf-8")

    def log(self, step: int, record: Record) -> None:
        """One line; a value that is not finite is written as null, which JSON can hold."""
        values = {name: value if math.isfinite(value) else None for name, value in record.items()}
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def text(self, step: int, name: str, text: str) -> None:
        """One line with the text under its name."""
        self._file.write(json.dumps({"step": step, name: text}, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _lines_up_to(path: Path, start: int) -> list[str]:
    """The lines of steps up to `start`, of a run that begins anew none; a line cut off by a crash is dropped.

    The text at the end of the earlier run goes too: the run that goes on writes its own.
    """
    if start == 0 or not path.exists():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record["step"] <= start and not any(isinstance(value, str) for value in record.values()):
            kept.append(line if line.endswith("\n") else line + "\n")
    return kept
