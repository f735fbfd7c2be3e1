"""How fast a tier is, on this machine and now.

Two sizes of copy, a and b, each the median of a few, give a line:

    seconds(n) = latency + n / bandwidth,   bandwidth = (b − a) / (seconds(b) − seconds(a))
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from hyper_parallel.compat import Backend
from hyper_parallel.offload.problem import Rate
from hyper_parallel.offload.tiers.tier import Pending, Tier

_SMALL = 64 * 2**10
_TIMES = 3
_ENOUGH = 0.06
"""Seconds after which no further copy of a size is begun."""


def measure(tier: Tier, backend: Backend, bytes: int = 32 * 2**20) -> tuple[Rate, Rate]:
    """Rates out of the device and back, from copies of up to `bytes`, or less where the tier holds less.

    The default is more than most caches of processors hold. To be called before the first `reserve`, since it reserves
    a slot of its own and gives it up. The current device is the one that is measured. Raises TierError.
    """
    large = max(min(bytes, tier.capacity // tier.align * tier.align), 1)
    small = min(_SMALL, large)
    x = torch.ones(large, dtype=torch.uint8, device=backend.name)
    tier.reserve({0: large})
    out, back = {}, {}
    try:
        tier.begin_write(0, x[:small]).wait()  # the first one sets things up
        for count in (small, large):
            part = x[:count]
            out[count] = _median(backend, partial(tier.begin_write, 0, part))
            back[count] = _median(backend, partial(tier.begin_read, 0, part))
    finally:
        tier.reserve({})
    return _rate(out), _rate(back)


def _median(backend: Backend, begin: Callable[[], Pending]) -> float:
    seconds: list[float] = []
    while len(seconds) < _TIMES and sum(seconds) < _ENOUGH:
        backend.synchronize()
        started = time.perf_counter()
        begin().wait()
        backend.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _rate(seconds: dict[int, float]) -> Rate:
    (small, first), (large, second) = min(seconds.items()), max(seconds.items())
    if second <= first or small == large:
        return Rate(0.0, large / second)
    bandwidth = (large - small) / (second - first)
    return Rate(max(first - small / bandwidth, 0.0), bandwidth)
