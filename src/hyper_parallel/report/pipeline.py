"""Figures of a simulated pipeline, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hyper_parallel.report.sheets import Sheet
from hyper_parallel.units import format_bytes, format_duration


@dataclass(frozen=True)
class StageFigures:
    """One stage on one rank of its device group. Seconds and bytes of one micro-batch."""

    stage: int
    group: int
    """The device group, by its place in the pipeline."""
    layers: int
    forward: float
    input: float
    weight: float
    exposed: float
    """Of these seconds, those in which only a collective of the stage's own mesh runs."""
    saved: int
    """Bytes that wait for the backward pass."""
    sent: int
    """Bytes that go to the next stage."""

    @property
    def seconds(self) -> float:
        """Seconds of a micro-batch."""
        return self.forward + self.input + self.weight


@dataclass(frozen=True)
class GroupFigures:
    """One device group over the step, on one rank of it."""

    group: int
    ranks: str
    stages: tuple[int, ...]
    computing: float
    """Seconds of tasks, the waits within its own mesh included."""
    fill: float
    """Seconds of bubbles: before its first task, between tasks, and after the last one."""
    waiting: float
    drain: float
    peak: int
    """Bytes."""
    resident: int
    """Of them, parameters, gradients and optimizer state."""
    in_flight: int
    """Micro-batches of a stage whose activations it holds at most."""


@dataclass(frozen=True)
class PipelineFigures:
    """The figures that a pipeline adds to a prediction."""

    schedule: str
    counts: tuple[int, ...]
    """Layers of each stage."""
    micro_batches: int
    span: float
    """Seconds from the first task to the last one."""
    ends: float
    """Seconds of the step besides: gathers, reductions and the update."""
    stages: tuple[StageFigures, ...]
    groups: tuple[GroupFigures, ...]
    pairs: int = 0
    """Forward passes of all groups that run together with a backward pass."""

    @property
    def slowest(self) -> GroupFigures:
        """The group that computes longest."""
        return max(self.groups, key=lambda one: one.computing)

    def share(self, name: str) -> float:
        """Mean of the groups' bubbles of one cause, or of all (``bubble``), as a share of the span."""
        causes = ("fill", "waiting", "drain") if name == "bubble" else (name,)
        total = sum(getattr(one, cause) for one in self.groups for cause in causes)
        return float(total / len(self.groups) / self.span) if self.span else 0.0

    def line(self) -> str:
        """The pipeline in a sentence."""
        slowest = self.slowest
        return (
            f"pipeline: {len(self.groups)} device groups, {len(self.stages)} stages of {_counted(self.counts)} layers, "
            f"schedule {self.schedule}, {self.micro_batches} micro-batches"
            f"{f', {self.pairs} forward passes beside backward passes' if self.pairs else ''}; simulated bubble "
            f"{self.share('bubble'):.1%} (fill {self.share('fill'):.1%}, waiting {self.share('waiting'):.1%}, drain "
            f"{self.share('drain'):.1%}); slowest is group {slowest.group}, stage{'s' * (len(slowest.stages) > 1)} "
            f"{', '.join(map(str, slowest.stages))}"
        )

    def sheets(self) -> list[Sheet]:
        """Tables of the groups and of the stages."""
        groups = tuple(
            (
                str(one.group),
                one.ranks,
                ", ".join(map(str, one.stages)),
                format_duration(one.computing),
                *(format_duration(seconds) for seconds in (one.fill, one.waiting, one.drain)),
                str(one.in_flight),
                format_bytes(one.resident),
                format_bytes(one.peak),
            )
            for one in self.groups
        )
        stages = tuple(
            (
                str(one.stage),
                str(one.group),
                str(one.layers),
                *(format_duration(seconds) for seconds in (one.forward, one.input, one.weight)),
                f"{one.exposed / one.seconds:.1%}" if one.seconds else "–",
                format_bytes(one.saved),
                format_bytes(one.sent) if one.sent else "–",
            )
            for one in self.stages
        )
        return [
            Sheet(
                "device groups of the pipeline",
                (
                    "group",
                    "ranks",
                    "stages",
                    "computing",
                    "fill",
                    "waiting",
                    "drain",
                    "in flight",
                    "state",
                    "peak",
                ),
                groups,
                left=3,
                drop=("in flight", "state", "waiting"),
                note="in flight: micro-batches whose activations a rank holds at most; state: parameters, gradients, "
                "optimizer",
            ),
            Sheet(
                "stages, each micro-batch",
                ("stage", "group", "layers", "F", "I", "W", "collectives", "saved", "sent on"),
                stages,
                left=2,
                drop=("sent on", "layers"),
                note="F forward pass, I gradients of inputs, W gradients of weights; collectives: share of F + I + W "
                "in which only a collective of the stage's own mesh runs",
            ),
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain data; seconds and bytes, all predicted."""
        return {
            "schedule": self.schedule,
            "layers": list(self.counts),
            "span": self.span,
            "ends": self.ends,
            "bubble": {name: self.share(name) for name in ("bubble", "fill", "waiting", "drain")},
            "slowest_group": self.slowest.group,
            "groups": [asdict(group) for group in self.groups],
            "stages": [asdict(stage) for stage in self.stages],
        }


def _counted(counts: Sequence[int]) -> str:
    """Counts in short form: ``8``, or ``8 · 8 · 9 · 7``."""
    if len(set(counts)) == 1:
        return str(counts[0])
    shown = [str(count) for count in counts]
    return " · ".join(shown if len(shown) <= 16 else [*shown[:7], "…", *shown[-7:]])
