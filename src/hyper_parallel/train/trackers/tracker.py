"""Tracker interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Record = Mapping[str, float]
"""Metric name to value. A step's holds `loss`, an evaluation's `eval_loss`; docs/training.md lists all."""


@dataclass(frozen=True)
class RunInfo:
    """What a tracker is opened with."""

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
