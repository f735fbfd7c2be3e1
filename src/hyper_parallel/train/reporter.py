"""Reporter: a run's progress on the terminal, its trackers and the files of its folder. Only rank 0 writes."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyper_parallel.checkpoint.durable import publish
from hyper_parallel.config import RunConfig, dump
from hyper_parallel.train.summary import Progress, Summary
from hyper_parallel.train.trackers import Record, RunInfo, Trackers, build_trackers

log = logging.getLogger(__name__)

RUN_FILE = "run.yaml"
"""What a run does, with inheritance and overrides resolved, in the run's folder: a run file itself."""


class Reporter:
    """Reports of one rank; on ranks other than the first, only notes in the rank's log."""

    def __init__(self, config: RunConfig, *, leads: bool) -> None:
        self._config, self._leads = config, leads
        self._progress: Progress | None = None
        self._trackers = Trackers([])

    def open(self, start: int) -> None:
        """Begin, before the first step of a run that continues from step `start`."""
        if self._leads:
            self._progress = Progress(start, self._config.train.steps)
            self._trackers = self._open_files(start)

    def reopen(self, step: int) -> None:
        """Continue after `step` again: later steps are recorded once, when they are repeated."""
        if self._leads:
            self._trackers.close()
            self._trackers = self._open_files(step)

    def close_trackers(self) -> None:
        """No step follows."""
        self._trackers.close()

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._progress is not None:
            self._progress.close()

    def note(self, text: str) -> None:
        """One line in the log and on the terminal."""
        log.info("%s", text)
        if self._progress is not None:
            self._progress.note(text)

    def log(self, step: int, record: Record) -> None:
        """Metrics after `step` steps."""
        if self._leads:
            self._trackers.log(step, record)

    def text(self, step: int, name: str, text: str) -> None:
        """A text after `step` steps, such as a sample."""
        if self._leads:
            self._trackers.text(step, name, text)

    def step(self, step: int, record: Record, seconds: float) -> None:
        """Metrics after `step` steps of `seconds` each."""
        self.log(step, record)
        if self._progress is not None:
            self._progress.step(step, record, (self._config.train.steps - step) * seconds)

    def evaluation(self, step: int, loss: float) -> None:
        """The held-out loss after `step` steps."""
        if self._progress is not None:
            self._trackers.log(step, {"eval_loss": loss})
            self._progress.evaluation(step, loss)

    def experts(self, step: int, loads: Mapping[str, Any]) -> None:
        """A line of ``experts.jsonl``: too many numbers for a tracker, and for every step."""
        if self._leads:
            with (Path(self._config.out) / "experts.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "loads": loads}) + "\n")

    def summary(self, summary: Summary) -> None:
        """Write the run's summary into its folder and on the terminal."""
        if self._progress is not None:
            summary.write()
            run_file = str(Path(self._config.out) / RUN_FILE)
            self._progress.summary(summary, list(self._config.trackers), run_file, self._config.train.epochs)

    def _open_files(self, start: int) -> Trackers:
        out = Path(self._config.out)
        # A resume of this run continues from its newest checkpoint, and not from the step that was chosen once.
        once = self._config.checkpoint.model_copy(update={"resume_from": None})
        publish(out / RUN_FILE, dump(self._config.model_copy(update={"checkpoint": once})).encode())
        info = RunInfo(out, self._config.model_dump(mode="json"), start)
        return build_trackers(self._config.trackers, info)
