"""Host queue: when the host enqueues each op of a class, if it takes time to do so.

A framework's host goes through a step in the order of its code and enqueues kernels, collectives and copies, ℓ seconds
each (`Device.host_launch`); an operator that is several kernels is so many launches (`Device.host_kernels`). It runs
ahead of the device until it reads a number that the device computes (an op of kind ``host``), where it waits:

    enqueued(i) = end(s) + ℓ · (launches behind s up to i)        s: the last op before i at which the host waited, or
                                                                  the step's begin
    start(i)    ≥ enqueued(i)

So a step of small kernels takes as long as its launches, and one of large kernels as long as its kernels. The depth of
the device's own queue is not limited. One addition for each op.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hyper_parallel.trace import Op


class HostQueue:
    """The hosts of all classes of a Trace. Ops of all classes are numbered consecutively, as in `Run`."""

    def __init__(
        self, classes: Iterable[Sequence[Op]], seconds: float, kernels: Mapping[str, float] | None = None
    ) -> None:
        """`seconds`: of one launch; `kernels`: launches by an op's name, 1 where it is not named."""
        kernels = kernels or {}
        self._seconds = seconds
        self._behind: list[float] = []
        """By op: seconds of launches of its class up to it."""
        self._class: list[int] = []
        self._since: list[float] = []
        """By class: when the host last went on, less the seconds of launches up to there."""
        for place, ops in enumerate(classes):
            behind = 0.0
            for op in ops:
                behind += seconds * kernels.get(op.name, 1.0) if _is_launched(op) else 0.0
                self._behind.append(behind)
                self._class.append(place)
            self._since.append(0.0)

    def enqueued(self, number: int) -> float:
        """When an op is enqueued, by the latest wait of its host."""
        return self._since[self._class[number]] + self._behind[number]

    def wait(self, number: int, end: float) -> None:
        """Let the host go on at the end of the op that it waited for."""
        self._since[self._class[number]] = end - self._behind[number]


def is_waited_for(op: Op) -> bool:
    """Whether the host waits for the op's end before it goes on."""
    return op.work is not None and op.work.kind == "host"


def _is_launched(op: Op) -> bool:
    return op.collective is not None or (op.work is not None and op.work.kind not in ("host", "view"))
