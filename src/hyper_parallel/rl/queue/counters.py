"""Counts of what a queue trained and what it lost, and the histogram of staleness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Items, and the tokens that the policy drew for them."""

    items: int = 0
    tokens: int = 0

    def plus(self, tokens: int) -> Tally:
        """With one more item."""
        return Tally(items=self.items + 1, tokens=self.tokens + tokens)


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Since the queue began, over restarts. Every item that started is running, finished, or counted here once."""

    trained: Tally = Tally()
    stale: Tally = Tally()
    """Dropped, because they could not be trained within the bound any more: only `order: discard` has them."""
    failed: Tally = Tally()
    """Lost with their worker."""
    refused: Tally = Tally()
    """Filtered out: their rewards have no variance, for example."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """How many trained items had each staleness, in optimizer updates."""

    @property
    def wasted_tokens(self) -> int:
        """Tokens that were drawn and not trained."""
        return self.stale.tokens + self.failed.tokens + self.refused.tokens

    @property
    def wasted_share(self) -> float:
        """Share of the tokens drawn so far that were not trained."""
        return self.wasted_tokens / max(1, self.wasted_tokens + self.trained.tokens)

    def state(self) -> dict[str, Any]:
        """Plain JSON data."""
        tallies = {name: [tally.items, tally.tokens] for name, tally in self._tallies().items()}
        return {**tallies, "staleness": {str(key): value for key, value in self.staleness.items()}}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Counters:
        """The counters of which `state` was made."""
        tallies = {name: Tally(items=state[name][0], tokens=state[name][1]) for name in Counters()._tallies()}
        return cls(staleness={int(key): value for key, value in state["staleness"].items()}, **tallies)

    def _tallies(self) -> dict[str, Tally]:
        return {
            "trained": self.trained,
            "stale": self.stale,
            "failed": self.failed,
            "refused": self.refused,
        }
