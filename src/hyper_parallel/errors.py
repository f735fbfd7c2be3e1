"""Exceptions that a user can cause; each message says what was found, what is needed and how to fix it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

PREFIX = "hyper-parallel: error: "
"""Begins each line on standard error that says what went wrong, whichever process writes it."""


class HyperParallelError(Exception):
    """The one base class: whatever a user's input, machine or file can cause derives from it.

    The command line prints its text on one line and exits with 2 (with 1 for a FaultError); anything else that
    escapes is a defect of ours and is shown with its traceback.
    """


class ConfigError(HyperParallelError):
    """A run file, an override or an argument that cannot be honoured."""


class StrategyError(ConfigError):
    """A Strategy that does not fit the model or the machine, or that names what is not built yet."""


class ProgramError(StrategyError):
    """A Program that can block, or whose instructions contradict each other; names the instructions."""


class SimulationError(StrategyError):
    """A model that the ranks of one process cannot follow; real workers can."""


class DataError(HyperParallelError):
    """A data file that cannot be read as what it was declared to be; names the file and the line."""


class CheckpointError(HyperParallelError):
    """A checkpoint that cannot be written, or that is damaged and must not be loaded."""


class TraceError(HyperParallelError):
    """A Trace that cannot run: what waits in a circle, or calls that other ranks do not make."""


class IntegrationError(ConfigError):
    """Something that another trainer, or its user, asks for and that cannot be honoured inside it."""


class FollowsError(HyperParallelError):
    """What another rank's failure led to on this one: that rank says why, and this is shown only if none does."""


class LaunchError(HyperParallelError):
    """Workers that could not be started or that died; names the rank."""


class WorkersFailedError(LaunchError):
    """Workers that were started here ended with `code`; what went wrong has been shown by then."""

    def __init__(self, code: int, out: str) -> None:
        super().__init__(f"the workers ended with exit code {code}; {out}/logs has a log for each rank")
        self.code = code


class CaptureError(HyperParallelError):
    """A step could not be written down as a graph; the message names what stopped it."""


class CompileError(HyperParallelError):
    """A step's graph could not be compiled; it runs as it is, slower."""


class GraphError(HyperParallelError):
    """A rewrite of a step's graph that would change what the step computes, or whose conditions do not hold."""


class OutOfMemoryError(HyperParallelError):
    """The memory of a device, or of the host, ran out in a step; says what filled it and which keys would help."""


class BudgetError(ConfigError):
    """No plan keeps a step within the memory that it was given. The message says what would do."""

    def __init__(self, text: str, why: str | None = None, floor: int | None = None) -> None:
        """`why`: the text without the advice, which names keys of a run file. `floor`: the least bytes that do."""
        super().__init__(text)
        self.why = why or text
        self.floor = floor


class TierError(HyperParallelError):
    """A memory beside the device's own could not keep or give back what it was given."""


class FaultError(TierError):
    """A memory or a disk failed while it was in use, or was damaged. Nothing that the user wrote is wrong: exit code 1,
    as for a worker that is lost."""


class NonFiniteError(HyperParallelError):
    """A loss or gradient that is not finite, found before the optimizer touched anything."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as ``; did you mean 'tensor'?``, or the empty string when nothing is near."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""
