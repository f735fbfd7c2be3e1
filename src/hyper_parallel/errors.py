"""Exceptions that a user can cause; each message says what was found, what is needed and how to fix it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

PREFIX = "hyper-parallel: error: "
"""Prefix of every error line on standard error, in all processes."""


def one_line(error: object, limit: int = 200) -> str:
    """The text of another library's error, on one line; the name of its kind where it says nothing."""
    return (" ".join(str(error).split()) or type(error).__name__)[:limit]


class HyperParallelError(Exception):
    """Base class of all errors that a user's input, machine or files can cause.

    The command line prints the message on one line and exits with 2 (with 1 for a FaultError); any other exception
    is a defect of HyperParallel and is shown with its traceback.
    """


class ConfigError(HyperParallelError):
    """A run file, an override or an argument that cannot be honoured."""


class StrategyError(ConfigError):
    """A Strategy that does not fit the model or the machine, or that names an unimplemented feature."""


class ProgramError(StrategyError):
    """A Program that can block, or whose instructions contradict each other; names the instructions."""


class SimulationError(StrategyError):
    """A model that simulated ranks in one process cannot run; real workers can."""


class DataError(HyperParallelError):
    """A data file that cannot be read as what it was declared to be; names the file and the line."""


class RewardError(HyperParallelError):
    """Rewards of too many answers that cannot be computed; has the last one's reason."""


class CheckpointError(HyperParallelError):
    """A checkpoint that cannot be written, or that is damaged and must not be loaded."""


class TraceError(HyperParallelError):
    """A Trace that cannot run: a cycle of waits, or a collective that other ranks do not make."""


class IntegrationError(ConfigError):
    """A setting of another trainer (Transformers, TRL, LlamaFactory) that HyperParallel cannot honour."""


class FollowsError(HyperParallelError):
    """A failure on this rank that another rank's failure caused. It is shown only if no rank reports the cause."""


class WeightsError(HyperParallelError):
    """Weights that cannot go from one role to another, or that did not arrive as they were sent; those there stay."""


class LaunchError(HyperParallelError):
    """Workers that could not be started or that died; names the rank."""


class PlaceError(LaunchError):
    """A launcher's worker whose place is impossible. Only this process knows, so it prints the error itself."""


class WorkersFailedError(LaunchError):
    """Workers started by this process ended with `code`; their error has been shown already."""

    def __init__(self, code: int, out: str) -> None:
        super().__init__(f"the workers ended with exit code {code}; {out}/logs has a log for each rank")
        self.code = code


class CaptureError(HyperParallelError):
    """A step cannot be captured as a graph; the message names the cause."""


class CompileError(HyperParallelError):
    """A step's graph could not be compiled, or its compiled code did not run; it runs uncompiled, and slower."""


class GraphError(HyperParallelError):
    """A rewrite of a step's graph that would change what the step computes, or whose conditions do not hold."""


class OutOfMemoryError(HyperParallelError):
    """A device or the host ran out of memory in a step; the message says what filled it and which keys would help."""


class UnsupportedModelError(ConfigError):
    """A model that generation cannot run correctly, with the reason."""


class BudgetError(ConfigError):
    """No plan keeps a step within its memory budget. The message gives the least budget that suffices."""

    def __init__(self, text: str, why: str | None = None, floor: int | None = None) -> None:
        """`why`: the message without the advice, which names keys of a run file. `floor`: the least sufficient budget
        in bytes.
        """
        super().__init__(text)
        self.why = why or text
        self.floor = floor


class TierError(HyperParallelError):
    """An offload tier could not store or return data."""


class FaultError(TierError):
    """Memory or a disk failed in use, or was damaged. It is no user error: exit code 1, as for a lost worker."""


class GroupError(FaultError):
    """A group of workers that died, failed or did not answer in time; names the group, ranks, operation and step."""

    def __init__(self, text: str, group: str = "", ranks: tuple[int, ...] = (), operation: str = "") -> None:
        super().__init__(text)
        self.group, self.ranks, self.operation = group, ranks, operation


class NonFiniteError(HyperParallelError):
    """A loss or gradient that is not finite, found before the optimizer updated anything."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as ``; did you mean 'tensor'?``, or the empty string if no name is similar."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""
