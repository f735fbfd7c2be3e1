"""Names of pipeline schedules, with the spellings of torch.distributed.pipelining, Megatron and the papers."""

from __future__ import annotations

import re
from enum import StrEnum

from hyper_parallel.errors import StrategyError, nearest


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
