"""Measures the bandwidth and latency of a tier.

Two sizes of copy, a and b, each the median of a few, give a line:

    seconds(n) = latency + n / bandwidth,   bandwidth = (b − a) / (seconds(b) − seconds(a))
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from hyper_parallel.compat import Backend
from hyper_parallel.compat.foreach_kernels import adamw_
from hyper_parallel.offloading.schedule.problem import Rate
from hyper_parallel.offloading.tiers.tier import Pending, Tier, Workplace

_SMALL = 64 * 2**10
_TIMES = 3
_ENOUGH = 0.06
"""Seconds after which no further copy of a size is begun."""


def measure(tier: Tier, backend: Backend, bytes: int = 32 * 2**20) -> tuple[Rate, Rate]:
    """Measure the rates out of the current device and back, with copies of up to `bytes`, or the tier's capacity.

    The default exceeds the caches of most processors. Call it before the first `reserve`, since it reserves a slot and
    releases it again. Raises TierError.
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


def measure_work(tier: Workplace, backend: Backend, bytes: int = 32 * 2**20) -> float:
    """B/s at which the host reads and writes what lies in a tier in an update by AdamW, of `bytes` or less in all.

    Called like `measure`, whose errors it has.
    """
    count = max(min(bytes, tier.capacity) // 4 // 4096 * 4096, 64)
    x = torch.zeros(count, dtype=torch.uint8, device=backend.name)
    tier.reserve(dict.fromkeys(range(4), count))
    seconds = []
    try:
        for slot in range(4):
            tier.begin_write(slot, x).wait()
        for _ in range(_TIMES):
            backend.synchronize()
            started = time.perf_counter()
            tier.begin_work("a measurement", range(4), _update).wait()
            seconds.append(time.perf_counter() - started)
    finally:
        tier.reserve({})
    # Of four tensors all are read, and three are written.
    return 7 * count / min(seconds)


def _update(memory: Sequence[torch.Tensor]) -> None:
    parameter, gradient, first, second = ([part.view(torch.float32)] for part in memory)
    adamw_(
        parameter,
        gradient,
        first,
        second,
        [torch.zeros(())],
        lr=1e-3,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        eps=1e-8,
    )


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
