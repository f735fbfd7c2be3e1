"""Where the ranks of two roles meet to make the process group that weights travel over: plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The address of the store, which one process of the source serves, and how many times the roles met before."""

    host: str
    port: int
    link: str = "weights"
    """Different for links that share a store."""
    epoch: int = 0
    """One more after each restart of a rank: a group that has lost one is of no more use."""

    def to_json(self) -> dict[str, Any]:
        """Keyword arguments of the class."""
        return asdict(self)

    @property
    def prefix(self) -> str:
        """Of the keys in the store."""
        return f"{self.link}/{self.epoch}"
