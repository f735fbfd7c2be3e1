"""Answers a query: searches, explains, and writes the run file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyper_parallel.errors import ConfigError
from hyper_parallel.planner import format, runnable
from hyper_parallel.planner.choice import Answer
from hyper_parallel.planner.constants import Constants, fitted
from hyper_parallel.planner.cost_model.memory import HOST_PART, on_host
from hyper_parallel.planner.cost_model.step import estimate
from hyper_parallel.planner.explain import Explanation, explain
from hyper_parallel.planner.memory_budget import MemoryBudget, memory_budget
from hyper_parallel.planner.metrics import Figures, figures
from hyper_parallel.planner.mixer_axes import left_out
from hyper_parallel.planner.query import LARGEST_CLUSTER, Question
from hyper_parallel.planner.run_file import PlannedRunFile, planned_run_file
from hyper_parallel.planner.runs_of_kind import Support, support
from hyper_parallel.planner.simplest import Tied, simplest
from hyper_parallel.planner.simulated_links import constants_for
from hyper_parallel.planner.sweep import ask
from hyper_parallel.planner.table import Table
from hyper_parallel.planner.user_strategy import user_strategy
from hyper_parallel.units import format_bytes


class NothingFitsError(ConfigError):
    """No strategy fits the devices' memory; says what the smallest needs, and what would make it fit."""


@dataclass(frozen=True)
class Refined:
    """What the simulator predicts of a strategy's real step."""

    seconds: float | None
    """None where the step cannot be captured."""
    peak: float | None
    """Bytes."""
    reason: str = ""
    """Why there is no prediction, or what it leaves out."""
    fits: bool | None = None
    """Whether the predicted peak is within a device's memory; None where there is no prediction."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the predicted step by part (`trace.step_parts`)."""


@dataclass(frozen=True, kw_only=True)
class PrintedAnswer:
    """What is shown of an answer."""

    question: Question
    answer: Answer
    tied: Tied | None
    """What ties with the quickest strategy; None where the first of `best` is that."""
    best: Sequence[Figures]
    why: Explanation
    support: Support
    """The published runs that the first of `best` rests on."""
    files: Sequence[PlannedRunFile]
    """The best as run files, in their order."""
    refined: Sequence[Refined] = field(default_factory=tuple)
    """What the simulator says of the first of `best`, where it was asked."""
    compared: Figures | None = None
    """A strategy that the user gave, by the same model."""
    tokens: float = 0.0
    """Of the whole run; 0: not given."""
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def chosen(self) -> int:
        """The place in `best` of what is written: of those that were simulated and fit the quickest, else the first."""
        timed = [
            (found.seconds, place)
            for place, found in enumerate(self.refined)
            if found.seconds is not None and found.fits is not False
        ]
        return min(timed)[1] if timed else 0


def solve(
    question: Question,
    constants: Constants | None = None,
    *,
    compare: Path | None = None,
    tokens: float = 0.0,
    model: Mapping[str, Any] | None = None,
) -> PrintedAnswer:
    """Search for the best strategies of a question; the answer, ready to print.

    `compare`: a file with the user's strategy. `tokens`: of the whole run. `model`: the section `model` of a run file,
    where it is known. Raises ConfigError where no strategy is legal, and NothingFitsError where no legal one fits.
    """
    known = constants or constants_for(question.profile, question.cluster)
    notes: list[str] = []
    row = Table.of(question.workload, question.cluster, question.profile, devices=float(question.devices))
    other = None if compare is None else row.replaced(**user_strategy(compare, question, notes))
    found, tied = simplest(question, known)
    if not found.best:
        raise NothingFitsError(_floor(found, known))
    best = [_figures(choice.table, known) for choice in found.best]
    return PrintedAnswer(
        question=question,
        answer=found,
        tied=tied,
        best=best,
        why=explain(found.best[0].table, question, known),
        support=support(found.best[0].table),
        files=[planned_run_file(one, question, model, _budget(one, question)) for one in best],
        compared=None if other is None else _figures(other, known),
        tokens=tokens,
        notes=[
            *_undivided(question),
            *(
                f"not searched: {reason}"
                for reason in left_out(question.workload.shape.mixer, question.runnable)
            ),
            *runnable.note((str(place), one) for place, one in enumerate(best, 1)),
            *notes,
        ],
    )


def _undivided(question: Question) -> list[str]:
    """A note where the batch itself rules out data parallelism over all devices, though it is large enough."""
    batch, devices = question.workload.batch, question.devices
    if batch % devices == 0 or 2 * batch < devices:
        return []
    near = [f"{devices * times:,}" for times in (batch // devices, batch // devices + 1) if times]
    return [
        f"{batch:,} sequences do not divide over {devices:,} devices, so that not all can share data; "
        f"--batch {' or '.join(near)} would"
    ]


def _figures(row: Table, constants: Constants) -> Figures:
    return figures(row, estimate(row, constants))[0]


def _budget(found: Figures, question: Question) -> MemoryBudget | None:
    """The budget of a strategy; None where nothing of it lies on the host."""
    return memory_budget(question.cluster, fitted(), found.on_host) if found.on_host else None


def _floor(found: Answer, constants: Constants) -> str:
    """Why nothing fits, and what would."""
    question = found.question
    assert found.smallest is not None
    least = _figures(found.smallest.table, constants)
    more = next(
        (devices for devices in _more(question.devices) if ask(question.on(devices), constants).fits), None
    )
    name, where = (
        question.workload.shape.name or "the model",
        question.cluster.name or question.cluster.source,
    )
    helps = [] if more is None else [f"{more:,} devices (estimated; --fit finds the fewest)"]
    if float(found.smallest.table.host_bytes.max()) == 0:
        helps.append("a host's memory in the cluster file (host, links.host)")
    if question.fix:
        helps.append("fixing less")
    if question.workload.sequence > 1024:
        helps.append("a shorter sequence")
    return (
        f"{name} fits no strategy on {_devices(question)} of {where}: the smallest of {found.counted:,} needs "
        f"{format.memory(least)} on a device{_beside(found.smallest.table)} (estimated; {format.axes(least.strategy)}, "
        f"{format.settings(least.strategy)}); "
        f"what would make it fit: {', or '.join(helps) or 'devices with more memory'}"
    )


def _devices(question: Question) -> str:
    return "1 device" if question.devices == 1 else f"{question.devices:,} devices"


def _beside(row: Table) -> str:
    """What a strategy needs of the host, in words; empty where it needs nothing."""
    moved, there = float(on_host(row).max()), float(row.host_bytes.max()) * HOST_PART
    return (
        f" and {format_bytes(moved)} of the {format_bytes(there)} of host that a device may use"
        if moved
        else ""
    )


def _more(devices: int) -> Iterator[int]:
    """Twice as many, and so on, six times."""
    for power in range(1, 7):
        if devices << power <= LARGEST_CLUSTER:
            yield devices << power
