"""One rollout engine with continuous batching, as a discrete-event model.

All running answers get a token in each pass, and a pass of n answers takes p + s n seconds. So a single counter of
passes says how far every answer is: one that joins at pass m and has t tokens ends at pass m + t, and the engine's
next event is the smallest such number, whatever joins or leaves before.
"""

from __future__ import annotations

import heapq
from math import inf


class Engine:
    """Running answers and the time that they took. Times are seconds; they never go back."""

    def __init__(self, slots: int, pass_seconds: float, sequence_seconds: float) -> None:
        self.slots = slots
        self.pass_seconds = pass_seconds
        self.sequence_seconds = sequence_seconds
        self.busy = 0.0
        """Seconds in which answers ran."""
        self.tokens = 0.0
        """Tokens drawn."""
        self._passes = 0.0
        self._now = 0.0
        self._running: list[tuple[float, int, float]] = []

    @property
    def running(self) -> int:
        """Answers that run."""
        return len(self._running)

    @property
    def held_tokens(self) -> float:
        """Tokens drawn so far for running answers."""
        return sum(self._passes - begun for _, _, begun in self._running)

    def next_end(self) -> float:
        """When the next answer ends; inf if none runs."""
        if not self._running:
            return inf
        return self._now + (self._running[0][0] - self._passes) * self._pass()

    def join(self, now: float, ticket: int, tokens: int) -> None:
        """An answer begins."""
        self.advance(now)
        heapq.heappush(self._running, (self._passes + tokens, ticket, self._passes))

    def end(self) -> tuple[float, int, int]:
        """The next answer ends: (when, ticket, tokens)."""
        when = self.next_end()
        self.advance(when)
        last, ticket, begun = heapq.heappop(self._running)
        self._passes = last  # free of rounding
        return when, ticket, round(last - begun)

    def advance(self, now: float) -> None:
        """Answers run until `now`, before any of them ends."""
        if now <= self._now:  # paused until later
            return
        if self._running:
            seconds = now - self._now
            self.busy += seconds
            passes = seconds / self._pass()
            self._passes += passes
            self.tokens += passes * len(self._running)
        self._now = now

    def pause(self, now: float, until: float) -> None:
        """Nothing runs between `now`, or the end of an earlier pause, and `until`."""
        self.advance(now)
        self._now = max(self._now, until)

    def stop(self, now: float, tickets: set[int]) -> dict[int, float]:
        """Answers of these tickets stop: the tokens that were drawn for them."""
        self.advance(now)
        drawn: dict[int, float] = {}
        for _, ticket, begun in self._running:
            if ticket in tickets:
                drawn[ticket] = drawn.get(ticket, 0.0) + self._passes - begun
        if drawn:
            self._running = [one for one in self._running if one[1] not in tickets]
            heapq.heapify(self._running)
        return drawn

    def _pass(self) -> float:
        return self.pass_seconds + self.sequence_seconds * len(self._running)
