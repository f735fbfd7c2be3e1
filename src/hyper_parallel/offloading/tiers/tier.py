"""Tier interface, closing of a tier, and measured rates of one."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import torch

from hyper_parallel.compat import Backend
from hyper_parallel.compat.kernels import adamw_
from hyper_parallel.errors import TierError
from hyper_parallel.offloading.schedule.problem import Rate

TIME_LIMIT = 120.0
"""Seconds after which a wait for a copy gives up."""


class Pending(Protocol):
    """A copy under way."""

    def wait(self) -> float:
        """Let what the caller computes next find the copy over; the seconds that the calling thread was held up.

        On an accelerator the current stream waits where it can, and the thread does not. Raises TierError if the copy
        failed, or if it takes longer than the tier's time limit.
        """

    def done(self) -> bool:
        """Whether it is over, well or badly, without waiting."""

    @property
    def seconds(self) -> float | None:
        """How long it had its link, without what it waited for before; None while it is under way, where it failed, and
        where nobody knows."""


class Tier(Protocol):
    """Copies of storages, by slot. One thread at a time calls it.

    Copies out and copies back each begin in the order in which they were asked for, beside one another and beside the
    compute. Where two copies are about the same bytes of the tier, the later one waits for the earlier one.
    """

    name: str
    capacity: int
    """Bytes that may lie here."""
    align: int
    """Offsets that are given to `reserve` are multiples of this."""

    def reserve(self, sizes: Mapping[int, int], offsets: Mapping[int, int] | None = None) -> None:
        """Have room for these slots (number to bytes), all of it taken now.

        Slots with overlapping `offsets` share memory: what is written to one of them is lost when another is written.
        Without `offsets` they lie one after the other. A later call replaces the slots, waits for copies under way, and
        keeps what lies in slots that stay. Raises TierError, and changes nothing, if there is not enough.
        """

    def begin_write(self, slot: int, x: torch.Tensor) -> Pending:
        """Begin to copy `x`, uint8 [n] on the device, to the slot, which has room for n bytes or more."""

    def begin_read(self, slot: int, x: torch.Tensor) -> Pending:
        """Begin to copy to `x`, uint8 [n] on the device, the n bytes that were last written to the slot."""

    def close(self) -> None:
        """Stop, and give everything back. Calls after the first do nothing."""


@runtime_checkable
class Workplace(Tier, Protocol):
    """A tier whose memory the host can compute on."""

    def begin_work(
        self, what: str, slots: Sequence[int], work: Callable[[Sequence[torch.Tensor]], None]
    ) -> Pending:
        """Begin to run `work` on what lies in slots, uint8 [n] each, in a thread of the host's own.

        Each was written before, and is written by this: copies to them that are under way are waited for, and later
        ones from them wait for the work, as if it were the copy that put there what they hold. Works run in the order
        in which they were asked for. `what`: in words, for messages.
        """

    def in_place(self, slot: int) -> torch.Tensor:
        """The content of a slot, uint8 [n] of the tier's own memory, to be read until the slot is written or reserved
        again. Waits for the copy that put it there."""


class Closing(ABC):
    """A tier that can be closed; a subclass says how what it has is given back (`_give_back`)."""

    name: str
    _closed = False

    def close(self) -> None:
        """As `Tier`. Copies under way are waited for."""
        if not self._closed:
            self._closed = True
            self._give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise TierError(f"the {self.name} tier is closed; open a new one")

    @abstractmethod
    def _give_back(self) -> None:
        """Called once."""


# Measures the bandwidth and latency of a tier.
#
# Two sizes of copy, a and b, each the median of a few, give a line:
#
#     seconds(n) = latency + n / bandwidth,   bandwidth = (b − a) / (seconds(b) − seconds(a))

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
