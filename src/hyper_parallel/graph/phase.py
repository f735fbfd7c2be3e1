"""Phases of a step (forward, backward, …), recorded on each captured node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Literal

Phase = Literal["forward", "loss", "backward", "clip", "optimizer"]
PHASES: tuple[Phase, ...] = ("forward", "loss", "backward", "clip", "optimizer")
"""In the order of the step."""

_phase: ContextVar[Phase] = ContextVar("phase", default="forward")


@contextlib.contextmanager
def phase(name: Phase) -> Iterator[None]:
    """What is computed in the block belongs to this phase."""
    token = _phase.set(name)
    try:
        yield
    finally:
        _phase.reset(token)


def current_phase() -> Phase:
    """The phase at hand; "forward" where nobody said."""
    return _phase.get()
