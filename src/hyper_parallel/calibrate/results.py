"""Measurements of one worker as plain rows, averaged over workers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


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

    def spread(self, *prefix: Hashable) -> float:
        """The mean spread of the measurements whose key has this prefix."""
        found = [spread for key, spread in self.spreads.items() if key[: len(prefix)] == prefix]
        return sum(found) / len(found) if found else 0.0


def averaged(results: Sequence[Results]) -> Results:
    """The geometric means over all workers' measurements."""
    merged = Results(notes=list(dict.fromkeys(note for each in results for note in each.notes)))
    for key in results[0].seconds:
        if all(key in each.seconds for each in results):
            seconds = math.exp(sum(math.log(each.seconds[key]) for each in results) / len(results))
            spread = sum(each.spreads[key] for each in results) / len(results)
            merged.add(key, seconds, spread)
    return merged
