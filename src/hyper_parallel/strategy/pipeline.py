"""`pipeline` section: the schedule of a pipeline, the names of schedules, and the layers of stages."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import Field, field_validator

from hyper_parallel.errors import StrategyError, nearest
from hyper_parallel.strategy.axes import AUTO
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


class ScheduleName(StrEnum):
    """Named schedules."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    ONE_F_ONE_B_SPLIT = "1f1b-split"
    INTERLEAVED = "interleaved-1f1b"
    ZB_H1 = "zb-h1"
    ZB_H2 = "zb-h2"
    ZB_V = "zb-v"
    V_HALF = "v-half"
    V_MIN = "v-min"
    DUAL_PIPE_V = "dualpipev"

    @classmethod
    def parse(cls, text: str) -> ScheduleName:
        """The schedule that a user names; case, hyphens, underscores and a leading ``Schedule`` do not matter.

        Raises StrategyError for an unknown name, with the nearest known one.
        """
        plain = _plain(text)
        if plain in _BY_SPELLING:
            return _BY_SPELLING[plain]
        raise StrategyError(
            f"schedule {text!r} is not known{nearest(text.lower(), [name.value for name in cls])}; "
            f"there are {', '.join(cls)}"
        )


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower()).removeprefix("schedule")


_ALIASES = {
    "PipeDream-Flush": ScheduleName.ONE_F_ONE_B,
    "non-interleaved": ScheduleName.ONE_F_ONE_B,
    "interleaved": ScheduleName.INTERLEAVED,
    "vpp": ScheduleName.INTERLEAVED,
    "virtual-pipeline": ScheduleName.INTERLEAVED,
    "zero-bubble": ScheduleName.ZB_H1,
    "zb1p": ScheduleName.ZB_H1,
    "ZBVZeroBubble": ScheduleName.ZB_V,
    "v-zb": ScheduleName.ZB_V,
    "cut-in-half": ScheduleName.DUAL_PIPE_V,
}
_BY_SPELLING = {_plain(name): name for name in ScheduleName} | {
    _plain(text): name for text, name in _ALIASES.items()
}
