"""Time of the training steps, and the rates that follow from it."""

from __future__ import annotations

import time

from hyper_parallel.workload import mfu


class Meter:
    """Adds up the seconds of steps, without what lies between them (evaluation, saving)."""

    def __init__(self, flops_per_token: float, devices: int, peak: float | None) -> None:
        self._flops, self._devices, self._peak = flops_per_token, devices, peak
        self.seconds = 0.0
        self.steps = 0
        self._tokens = 0
        self._marked = (0.0, 0, 0)
        self._began = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._began = time.perf_counter()

    def end(self, tokens: int) -> float:
        """The step ended; the host had waited for the device's gradients in it. `tokens`: positions computed, over all
        ranks. The step's seconds."""
        seconds = time.perf_counter() - self._began
        self.seconds += seconds
        self.steps += 1
        self._tokens += tokens
        return seconds

    def rates(self) -> dict[str, float]:
        """`seconds` a step, `tokens_per_second` and, with a known peak, `mfu`, of the steps since the last call."""
        seconds, steps, tokens = self._marked
        self._marked = (self.seconds, self.steps, self._tokens)
        return self._rates(self.seconds - seconds, self.steps - steps, self._tokens - tokens)

    def overall(self) -> dict[str, float]:
        """The same over all steps; empty before the first."""
        return self._rates(self.seconds, self.steps, self._tokens)

    def _rates(self, seconds: float, steps: int, tokens: int) -> dict[str, float]:
        if not steps or seconds <= 0:
            return {}
        rates = {"seconds": seconds / steps, "tokens_per_second": tokens / seconds}
        if self._peak is not None:
            rates["mfu"] = mfu(tokens * self._flops, seconds, self._devices, self._peak)
        return rates
