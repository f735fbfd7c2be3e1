"""Phases of a step (forward, backward, …), recorded on each captured node."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Literal

from hyper_parallel.graph.step_context import current_step

Phase = Literal["forward", "loss", "backward", "clip", "optimizer"]
PHASES: tuple[Phase, ...] = ("forward", "loss", "backward", "clip", "optimizer")
"""In the order of the step."""


def phase(name: Phase) -> AbstractContextManager[None]:
    """What is computed inside belongs to this phase."""
    return replace(current_step(), phase=name).installed()
