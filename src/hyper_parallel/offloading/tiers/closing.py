"""Closing a tier: once, at the latest at the end of its `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from hyper_parallel.errors import TierError


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
