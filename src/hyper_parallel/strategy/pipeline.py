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
    `auto` makes a schedule for the stages at hand, on no rank of which more is kept for backward passes than on the
    fullest one of `1f1b`.
    """
    virtual: Annotated[int, Field(ge=1, strict=True)] | None = None
    """Stages on each rank. Default: what the schedule has: 1, or 2 for interleaved and V-shaped ones."""
    layers: Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(min_length=1)] | None = None
    """Layers of each stage, in order. Default: cut by estimated time, with embedding, head and loss counted."""

    @field_validator("schedule")
    @classmethod
    def _known(cls, given: str) -> str:
        if given == AUTO:
            return given
        try:
            return ScheduleName.parse(given).value
        except StrategyError as error:
            raise ValueError(f"{error}, auto") from None
