"""Where checkpoints go and when they are written."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hyper_parallel.strategy.section import Section


class CheckpointConfig(Section):
    """Checkpoints: a folder a step, committed when complete, loadable into any strategy and number of workers."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints; 0 writes one at the end only."""
    keep: Annotated[int, Field(ge=1)] = 2
    """How many of the newest are kept; older ones go only after a newer one is durable."""
    background: bool = True
    """Write while training goes on; only the copy out of the device is waited for."""
    resume: bool = True
    """Continue from the newest verified checkpoint in the run's folder, if there is one."""
