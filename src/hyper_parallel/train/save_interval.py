"""When the next checkpoint is due: after a number of steps, or after a length of time."""

from __future__ import annotations

import time
from collections.abc import Callable

from hyper_parallel.config import CheckpointConfig


class SaveInterval:
    """The interval that `checkpoint.every` declares, as one rank's clock sees it.

    Clocks differ between ranks: what `elapsed` says is a wish, on which the ranks agree in the step itself.
    """

    def __init__(self, config: CheckpointConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._seconds, self._clock = config.every_steps, config.every_seconds, clock
        self._began = clock()

    def elapsed(self) -> bool:
        """Whether the time since the last checkpoint, or since the run began, is up."""
        return self._seconds is not None and self._clock() - self._began >= self._seconds

    def reached(self, step: int) -> bool:
        """Whether steps are counted and `step` updates are a multiple of the interval. Equal on every rank."""
        return self._steps is not None and step % self._steps == 0

    def saved(self) -> None:
        """A checkpoint is being written: the time begins anew."""
        self._began = self._clock()
