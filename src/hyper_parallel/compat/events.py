"""Clocks for the work that a thread gives to a device: a row of stamps, read once the work is done."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from hyper_parallel.compat.backend import Backend, Event


class Clock(Protocol):
    """Stamps the work that the calling thread gives to the current device."""

    def stamp(self) -> None:
        """Mark the end of the work given so far."""

    def read(self) -> list[float]:
        """Seconds from the first stamp to each, once all are reached; the clock is empty then."""


class HostClock:
    """Of a device that has done a piece of work when the call returns."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def stamp(self) -> None:
        """Mark the present."""
        self._times.append(time.perf_counter())

    def read(self) -> list[float]:
        """Seconds from the first stamp to each."""
        times, self._times = self._times, []
        return [at - times[0] for at in times]


class EventClock:
    """Of a device that runs behind the host: events on the stream that the thread computes on."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._events: list[Event] = []

    def stamp(self) -> None:
        """Record an event."""
        event = self._backend.Event(timing=True)
        event.record()
        self._events.append(event)

    def read(self) -> list[float]:
        """Seconds from the first event to each; waits for all work."""
        self._backend.synchronize()
        events, self._events = self._events, []
        return [events[0].elapsed_time(event) * 1e-3 for event in events]
