"""`strategy="auto"` inside another trainer: the planner of `auto`, asked about the model that is there."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hyper_parallel.errors import IntegrationError
from hyper_parallel.strategy import Strategy


@dataclass(frozen=True)
class Asked:
    """What the planner is asked."""

    strategy: Strategy
    """With open axes."""
    model: nn.Module
    world: int
    batch: int
    """Rows that one rank computes at once."""
    length: int
    """Positions of a row."""


def planned(asked: Asked) -> Strategy:
    """The strategy that rank 0 chooses, on every rank."""
    raise IntegrationError("auto")
