"""Which groups of answers teach something, and what an overlong answer costs (DAPO's sampling and length rules).

DAPO (arXiv 2503.14476): dynamic sampling keeps a prompt whose answers are neither all right nor all wrong (equation
11), because a group without reward variance has no advantage and no gradient: `has_reward_variance`. Soft overlong
punishment (equation 13), `overlong_penalty`, with L the length in tokens:

    0                                   L ≤ max_length − buffer
    (max_length − buffer − L) / buffer  max_length − buffer < L ≤ max_length
    −1                                  L > max_length

No torch: a controller decides by these which samples are trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hyper_parallel.errors import ConfigError


def has_reward_variance(rewards: Sequence[float | None], tolerance: float = 1e-8) -> bool:
    """Whether the rewards of one group differ by more than `tolerance`; None and NaN (no reward) are left out."""
    known = [reward for reward in rewards if reward is not None and not math.isnan(reward)]
    return bool(known) and max(known) - min(known) > tolerance


def groups_without_variance(groups: Iterable[Sequence[float | None]]) -> int:
    """The number of groups whose rewards are all the same: their answers train nothing."""
    return sum(not has_reward_variance(rewards) for rewards in groups)


def overlong_penalty(length: int, *, max_length: int, buffer: int) -> float:
    """What is added to the reward of an answer of `length` tokens: from 0 to −1 over the last `buffer` tokens.

    Raises ConfigError unless 0 < `buffer` ≤ `max_length`.
    """
    if not 0 < buffer <= max_length:
        raise ConfigError(
            f"got an overlong buffer of {buffer} tokens; need from 1 to the longest answer, {max_length}"
        )
    return -min(1.0, max(0.0, (length - (max_length - buffer)) / buffer))
