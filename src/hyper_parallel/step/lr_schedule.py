"""Learning-rate schedule as a pure function of the step: linear warm-up, then a shape, relative to the peak.

Step n is the n-th update, counted from 0, of T. With W steps of warm-up, floor f and t = (n + 1 − W) / (T − W):

    warm-up    (n + 1) / W                                  for n < W, so that no step is spent at 0
    cosine     f + (1 − f) · (1 + cos π t) / 2              Loshchilov and Hutter, arXiv 1608.03983
    linear     f + (1 − f) · (1 − t)
    constant   1
    wsd        1, then linear to f over the last D = round(decay · T) steps    Hu et al., arXiv 2404.06395

The peak is reached at step W − 1 (n + 1 = W) and the floor at the last step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from hyper_parallel.config.train import ScheduleConfig

Schedule = Callable[[int], float]
"""Step, counted from 0, to the share of the peak learning rate, 0 to 1."""


def schedule(config: ScheduleConfig, steps: int) -> Schedule:
    """The schedule that `config` declares over `steps` updates; steps at and beyond the last stay at the floor."""
    warmup, floor = config.warmup_steps(steps), config.floor
    shape = {
        "cosine": _cosine,
        "linear": _linear,
        "constant": _constant,
        "wsd": _wsd(config.decay, steps, warmup),
    }[config.name]

    def scale(step: int) -> float:
        done = step + 1
        if done < warmup:
            return done / warmup
        progress = min((done - warmup) / max(steps - warmup, 1), 1.0)
        return shape(progress, floor)

    return scale


def _cosine(progress: float, floor: float) -> float:
    return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2


def _linear(progress: float, floor: float) -> float:
    return floor + (1 - floor) * (1 - progress)


def _constant(progress: float, floor: float) -> float:
    return 1.0


def _wsd(decay: float, steps: int, warmup: int) -> Callable[[float, float], float]:
    # The decay never reaches back into the warm-up: the peak is always reached.
    span = min(max(round(decay * steps), 1), max(steps - warmup, 1)) / max(steps - warmup, 1)

    def shape(progress: float, floor: float) -> float:
        return floor + (1 - floor) * min(1.0, (1 - progress) / span)

    return shape
