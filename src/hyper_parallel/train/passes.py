"""Which rewrites a step's graph goes through before it runs, by what the strategy asks for."""

from __future__ import annotations

from hyper_parallel.graph.passes import Pass
from hyper_parallel.strategy import Strategy


def passes_for(strategy: Strategy) -> tuple[Pass, ...]:
    """In the order in which they run."""
    return ()
