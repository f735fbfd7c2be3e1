"""Times of repeated calls, the lower quartile and the spread; and the rows of all measurements.

    seconds = lower quartile of the repetitions         spread = (third quartile − first) / median      `Timer.of`

A repetition has enough calls to make the clock's own cost negligible. The lower quartile replaces the median because
other load only adds time; on a quiet machine the two are within a percent. Where workers outnumber the cores, a
repetition may or may not be preempted: there the mean over a window much longer than a scheduler time slice is used
instead (`Timer.mean`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch

from hyper_parallel.compat import Backend

KEPT = 64 * 2**20
"""Bytes of results that stay alive while an operator is repeated, like activations, and of the operands that its calls
cycle through, like weights: more than the caches hold.
"""
_TURNS = 256
"""Maximum number of operands to cycle through: small ones leave the nearest caches long before."""


@dataclass(frozen=True)
class Sample:
    """Result of the repetitions."""

    seconds: float
    spread: float


@dataclass(frozen=True)
class Timer:
    """Times calls on a device."""

    backend: Backend
    budget_s: float = 0.04
    """Time limit in seconds for all repetitions of one call, beyond the minimum number."""
    least: int = 5
    most: int = 15

    def of(self, call: Callable[[], Any]) -> Sample:
        """The time of one call."""
        started = time.perf_counter()
        self._once(call, 1)  # the first call of all also loads and plans
        calls = max(1, min(30, int(5e-5 / max(self._once(call, 1), 1e-7))))
        taken: list[float] = []
        while len(taken) < self.most:
            taken.append(self._once(call, calls))
            spent = time.perf_counter() - started
            # For long calls, or on a busy machine, there is time for only three repetitions.
            if spent > self.budget_s and len(taken) >= (self.least if spent < 4 * self.budget_s else 3):
                break
        taken.sort()
        first_quartile, median, third = (taken[len(taken) * part // 4] for part in (1, 2, 3))
        return Sample(first_quartile, (third - first_quartile) / median)

    def mean(self, call: Callable[[], Any], window_s: float) -> float:
        """The mean time of one call over at least `window_s`."""
        call()
        self.backend.synchronize()
        calls, started = 0, time.perf_counter()
        while time.perf_counter() - started < window_s:
            call()
            calls += 1
        self.backend.synchronize()
        return (time.perf_counter() - started) / calls

    def _once(self, call: Callable[[], Any], calls: int) -> float:
        self.backend.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        self.backend.synchronize()
        return (time.perf_counter() - started) / calls


def keeping(call: Callable[[], Any], bytes: int) -> Callable[[], None]:
    """`call` with its last results kept alive, so that each result is written into different memory; `bytes` of one
    result.
    """
    kept: deque[Any] = deque(maxlen=max(1, min(4096, KEPT // max(bytes, 1))))
    return lambda: kept.append(call())


def in_turns(arguments: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yields the arguments repeatedly, with every tensor except the first at a different address each time.

    In a step, too, one operand was just computed, and the others (weights, saved activations) are no longer cached.
    """
    others = sum(tensor.nbytes for tensor in tensors_of(arguments)[1:])
    count = max(1, min(_TURNS, KEPT // others)) if others else 1
    return cycle([arguments, *(_moved(arguments) for _ in range(count - 1))])


def _moved(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    first = tensors_of(arguments)[0]

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value if value is first else value.clone()
        return type(value)(copied(one) for one in value) if isinstance(value, list | tuple) else value

    return tuple(copied(value) for value in arguments)


def tensors_of(values: Any) -> list[torch.Tensor]:
    """The tensors in nested lists and tuples."""
    if isinstance(values, torch.Tensor):
        return [values]
    return [t for value in values for t in tensors_of(value)] if isinstance(values, list | tuple) else []


def filled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normal random numbers: with zeros or uninitialised memory some kernels take different times."""
    return torch.randn(shape, device=device).to(dtype)


@dataclass
class Results:
    """Seconds and spread of each measurement. Keys are tuples; the first entry names the table."""

    seconds: dict[tuple[Hashable, ...], float] = field(default_factory=dict)
    spreads: dict[tuple[Hashable, ...], float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, key: tuple[Hashable, ...], seconds: float, spread: float) -> None:
        """Add a measurement."""
        self.seconds[key] = seconds
        self.spreads[key] = spread

    def table(self, *prefix: Hashable) -> dict[tuple[Hashable, ...], float]:
        """The measurements whose key has this prefix, by the rest of the key."""
        n = len(prefix)
        return {key[n:]: seconds for key, seconds in self.seconds.items() if key[:n] == prefix}

    def grouped(self, *prefix: Hashable, parts: int) -> dict[tuple[Any, ...], dict[Any, float]]:
        """The measurements with this prefix: the next `parts` of their keys to the rest, one value or a tuple of them,
        to seconds."""
        groups: dict[tuple[Any, ...], dict[Any, float]] = {}
        for key, seconds in self.table(*prefix).items():
            rest = key[parts:]
            groups.setdefault(key[:parts], {})[rest if len(rest) > 1 else rest[0]] = seconds
        return groups

    def spread(self, *prefix: Hashable) -> float:
        """The mean spread of the measurements whose key has this prefix."""
        found = [spread for key, spread in self.spreads.items() if key[: len(prefix)] == prefix]
        return sum(found) / len(found) if found else 0.0


def rounded(number: float) -> float:
    """Rounded to five digits; no measurement is more accurate."""
    return float(f"{number:.5g}")


def averaged(results: Sequence[Results]) -> Results:
    """The geometric means over all workers' measurements."""
    merged = Results(notes=list(dict.fromkeys(note for each in results for note in each.notes)))
    for key in results[0].seconds:
        if all(key in each.seconds for each in results):
            seconds = math.exp(sum(math.log(each.seconds[key]) for each in results) / len(results))
            spread = sum(each.spreads[key] for each in results) / len(results)
            merged.add(key, seconds, spread)
    return merged


@dataclass(frozen=True)
class Job:
    """The measurements of one round, the same for every worker."""

    world: int
    threads: int
    device: str
    level: str
    """Extent: `full`, `quick` or `tiny`."""
    parts: tuple[str, ...]
    """The parts to measure, as `measure.measure` names them."""
    folder: str
    """The folder in which flash is measured and the workers meet."""
