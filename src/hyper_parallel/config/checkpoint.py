"""Where checkpoints go and when they are written."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from hyper_parallel.strategy.section import Section
from hyper_parallel.units import parse_seconds


class CheckpointConfig(Section):
    """Checkpoints: a folder a step, committed when complete, loadable into any strategy and number of workers."""

    every: Annotated[int | str, Field(json_schema_extra={"examples": ["15min", "2h", 500], "minimum": 0})] = (
        "15min"
    )
    """How often one is written: a length of time (`90s`, `15min`, `2h`), or a number of steps. 0 writes one at the end
    only. What a crash costs is at most what was trained in between."""
    keep: Annotated[int, Field(ge=1)] = 2
    """How many of the newest are kept; older ones go only after a newer one is durable. With 1 the one before stays as
    well: only the step after a checkpoint shows that its weights are worth going on from."""
    background: bool = True
    """Write while training goes on; only the copy out of the device is waited for."""
    resume: bool = True
    """Continue from the newest verified checkpoint in the run's folder whose weights are healthy, if there is one."""
    resume_from: Annotated[int, Field(ge=1)] | None = None
    """Continue from the checkpoint of this step instead, whatever its health. Newer ones are passed over from then on.
    The same command again goes on from the newest of its own. `train --resume-from` asks for it too."""
    allow_other_data: bool = False
    """Go on although the training text, or how it is packed, is not what the checkpoint was trained on. The other text
    is taken from its first row on. Without this, other text is refused; moving or renaming the files is no change."""

    @field_validator("every", mode="before")
    @classmethod
    def _every_is_steps_or_time(cls, given: Any) -> Any:
        told = f"must be a number of steps or a length of time such as 15min (got {given!r})"
        if isinstance(given, str):
            try:
                seconds = parse_seconds(given)
            except ValueError:
                raise ValueError(told) from None
            if seconds <= 0:
                raise ValueError(
                    "must be longer than no time at all; 0, a number of steps, writes at the end only"
                )
        elif isinstance(given, bool) or not isinstance(given, int) or given < 0:
            raise ValueError(told)
        return given

    @model_validator(mode="after")
    def _resumes_or_not(self) -> CheckpointConfig:
        if self.resume_from is not None and not self.resume:
            raise ValueError(
                "'resume_from' names a step to go on from, and 'resume' is false; leave one of them out"
            )
        return self

    @property
    def every_steps(self) -> int | None:
        """Steps between checkpoints; None where there are none but the last, or where the clock decides."""
        return self.every if isinstance(self.every, int) and self.every else None

    @property
    def every_seconds(self) -> float | None:
        """Seconds between checkpoints; None where steps decide."""
        return parse_seconds(self.every) if isinstance(self.every, str) else None
