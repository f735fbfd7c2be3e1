"""`checkpoint` section: when checkpoints are written and which are kept."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from hyper_parallel.strategy.section import Section
from hyper_parallel.units import parse_seconds


class CheckpointConfig(Section):
    """Checkpoints: one folder per step, committed when complete, loadable into any strategy and number of
    workers.
    """

    every: Annotated[int | str, Field(json_schema_extra={"examples": ["15min", "2h", 500], "minimum": 0})] = (
        "15min"
    )
    """The interval between checkpoints: a length of time (`90s`, `15min`, `2h`), or a number of steps. 0 writes one at
    the end only. A crash loses at most the steps since the last one.
    """
    keep: Annotated[int, Field(ge=1)] = 2
    """Number of newest checkpoints to keep; older ones are removed only after a newer one is durable. With 1 the
    previous one stays as well, since only the next step shows whether a checkpoint's weights are healthy.
    """
    background: bool = True
    """Write in the background; training waits only for the copy out of the device."""
    resume: bool = True
    """Continue from the newest verified checkpoint in the run's folder whose weights are healthy, if there is one."""
    resume_from: Annotated[int, Field(ge=1)] | None = None
    """Continue from the checkpoint of this step instead, whatever its health. Newer checkpoints are ignored
    from then on; repeating the command continues from the newest checkpoint written since. Also set by `train
    --resume-from`.
    """
    allow_other_data: bool = False
    """Continue with other training text, or other packing, than the checkpoint was trained on, from its first
    row. By default other text is refused; moved or renamed files count as the same text.
    """

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
        """Steps between checkpoints; None if only the last step writes one, or if the interval is a time."""
        return self.every if isinstance(self.every, int) and self.every else None

    @property
    def every_seconds(self) -> float | None:
        """Seconds between checkpoints; None if the interval is a number of steps."""
        return parse_seconds(self.every) if isinstance(self.every, str) else None
