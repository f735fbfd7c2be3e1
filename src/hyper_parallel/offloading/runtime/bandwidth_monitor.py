"""Bandwidth monitor: whether links are as fast as the offload plan assumes.

Of each link, a tier in one direction, and each step, over the step's large copies, in seconds that they had the link:

    ratio(step) = Σ seconds / Σ (latency + bytes / bandwidth)       by the rate of the plan  `BandwidthMonitor.ended`
    ratio = median of ratio(step) over the last STEPS steps                                  `BandwidthMonitor.ratios`
    rate as measured = (latency · ratio, bandwidth / ratio)                                  `BandwidthMonitor.measured`

A link departs from its plan when every one of those steps did, in the same direction, by more than DEPARTS. What a copy
waits for, those before it on its link among them, is not the link's time, and small copies say little about bytes.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hyper_parallel.offloading.schedule.problem import OffloadTier, Rate
from hyper_parallel.offloading.tiers import Pending

STEPS = 8
"""Looked back at."""
DEPARTS = 1.2
"""Times as slow as planned, or as fast."""
LARGE = 256 * 2**10
"""Bytes of the smallest copy that counts."""
FIRST = 4
"""Steps at the beginning that are not looked at: memory is touched for the first time in them."""

Link = tuple[str, bool]
"""Tier, and whether copies go out to it."""


class BandwidthMonitor:
    """What a rank's links were like in the last steps."""

    def __init__(self, spaces: Sequence[OffloadTier]) -> None:
        """`spaces`: with the rates that plans go by."""
        self._spaces = tuple(spaces)
        self._rates: dict[Link, Rate] = {}
        self._ratios: dict[Link, deque[float]] = defaultdict(lambda: deque(maxlen=STEPS))
        self._copies: list[tuple[Link, int, Pending]] = []
        self._steps = 0
        self.plan_by(spaces)

    def plan_by(self, spaces: Sequence[OffloadTier]) -> None:
        """Plans go by these rates from now on; nothing is known yet of how right they are."""
        self._spaces = tuple(spaces)
        for space in spaces:
            self._rates[space.name, True], self._rates[space.name, False] = space.out, space.back
        self._ratios.clear()

    def began(self, tier: str, out: bool, count: int, copy: Pending) -> None:
        """A copy of `count` bytes is under way."""
        if count >= LARGE and (tier, out) in self._rates:
            self._copies.append(((tier, out), count, copy))

    def ended(self) -> None:
        """A step is over."""
        self._steps += 1
        seconds: dict[Link, float] = defaultdict(float)
        predicted: dict[Link, float] = defaultdict(float)
        left = []
        for link, count, copy in self._copies:
            if copy.seconds is not None:
                seconds[link] += copy.seconds
                predicted[link] += self._rates[link].seconds(count)
            elif not copy.done():
                left.append((link, count, copy))
        self._copies = left
        if self._steps > FIRST:
            for link, known in predicted.items():
                self._ratios[link].append(seconds[link] / known)

    @property
    def ratios(self) -> dict[Link, float]:
        """Of each link that was seen for long enough, how many times as long as planned its copies take."""
        return {link: statistics.median(known) for link, known in self._ratios.items() if len(known) == STEPS}

    @property
    def departed(self) -> dict[Link, float]:
        """Those of the links that are slower or faster than planned in step after step."""
        return {link: self.ratios[link] for link, known in self._ratios.items() if _departs(known)}

    def measured(self) -> tuple[OffloadTier, ...]:
        """The spaces with their rates as they were in the last steps."""
        return tuple(
            replace(space, out=self._measured(space.name, True), back=self._measured(space.name, False))
            for space in self._spaces
        )

    def told(self) -> Iterator[str]:
        """Of each link that departed, its rate as measured and as planned."""
        for (tier, out), ratio in sorted(self.departed.items()):
            planned = self._rates[tier, out].bandwidth
            way = "to" if out else "from"
            yield f"{way} {tier} {planned / ratio / 1e9:.3g} GB/s instead of {planned / 1e9:.3g}"

    def _measured(self, tier: str, out: bool) -> Rate:
        rate, ratio = self._rates[tier, out], self.ratios.get((tier, out), 1.0)
        return Rate(rate.latency * ratio, rate.bandwidth / ratio)


def _departs(ratios: Sequence[float]) -> bool:
    return len(ratios) == STEPS and (min(ratios) > DEPARTS or max(ratios) < 1 / DEPARTS)
