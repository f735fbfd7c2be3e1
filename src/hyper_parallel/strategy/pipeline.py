"""`pipeline` section: the schedule of a pipeline, and the layers of its stages."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from hyper_parallel.errors import StrategyError
from hyper_parallel.strategy.axes import AUTO
from hyper_parallel.strategy.schedule_name import ScheduleName
from hyper_parallel.strategy.section import Section


class Pipeline(Section):
    """Pipeline parallelism over `axes.pipeline` device groups."""

    schedule: str = AUTO
    """`gpipe`, `1f1b`, `1f1b-split`, `interleaved-1f1b`, `zb-h1`, `zb-h2`, `zb-v`, `v-half`, `v-min` or `dualpipev`;
    `auto` makes a schedule for these stages, in which no rank holds more saved activations than the fullest rank of
    `1f1b` does.
    """
    virtual: Annotated[int, Field(ge=1, strict=True)] | None = None
    """Stages on each rank. Default: 2 for interleaved and V-shaped schedules, 1 for the others."""
    layers: Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(min_length=1)] | None = None
    """Layers of each stage, in order. Default: cut by estimated time, with embedding, head and loss counted."""
    overlap_forward_backward: Annotated[bool, Field(strict=True)] = False
    """Run the forward pass of a micro-batch together with the backward pass of another one (DualPipe), so that one
    computes while the other waits for a collective of its stage's own mesh. `1f1b` and `interleaved-1f1b` begin with
    more forward passes for it, and hold as many more micro-batches.
    """

    @field_validator("schedule")
    @classmethod
    def _known(cls, given: str) -> str:
        if given == AUTO:
            return given
        try:
            return ScheduleName.parse(given).value
        except StrategyError as error:
            raise ValueError(f"{error}, auto") from None
