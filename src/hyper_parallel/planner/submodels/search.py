"""The best sizes of parts on devices of their own, and the best of one mesh for all parts.

Sizes are taken in the order of a lower bound of their steps, and the search ends where no bound is below the best:

    bound = max over parts of Σ their work in a step / their devices  +  what they do once a step
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from hyper_parallel.errors import ConfigError
from hyper_parallel.planner.submodels.sizes import (
    Row,
    Sizes,
    Task,
    colocated_bytes,
    encoder_bytes,
    language_bytes,
    micro_batches,
    once_of_parts,
)
from hyper_parallel.planner.submodels.stages import language_stages
from hyper_parallel.planner.submodels.steps import Step, colocated, disjoint
from hyper_parallel.units import format_bytes

ROWS = (1, 2, 4, 8)
"""Of a micro-batch on a data rank."""
DEEPEST = 16
"""Stages of a pipeline."""


@dataclass
class Found:
    """The best sizes of a rule."""

    sizes: Sizes | None = None
    seconds: float = math.inf
    """Of a step, on the mean."""
    bubbles: float = 1.0
    """Of the devices' time: the share in which they compute nothing."""
    tried: int = 0
    steps: list[Step] = field(default_factory=list)


StepOf = Callable[[Task, Sizes, Sequence[Row]], Step | None]


def best(
    task: Task, sizes: Iterator[Sizes], step: StepOf, bound: Callable[[Task, Sizes], float] | None = None
) -> Found:
    """Of all sizes, by the mean of the same steps. With `bound`, by which `sizes` are sorted, the search ends early."""
    found = Found()
    for one in sizes:
        if bound is not None and bound(task, one) >= found.seconds:
            break
        steps: list[Step] = []
        for rows in task.steps:
            made = step(task, one, rows)
            if made is None:
                break
            steps.append(made)
        if len(steps) < len(task.steps):
            continue
        found.tried += 1
        seconds = sum(made.seconds for made in steps)
        if seconds < found.seconds * len(steps):
            busy = sum(made.busy for made in steps)
            found.sizes, found.seconds, found.steps = one, seconds / len(steps), steps
            found.bubbles = 1 - busy / (task.devices * seconds)
    return found


@dataclass(frozen=True)
class Allocations:
    """The best of both."""

    task: Task
    disjoint: Found
    colocated: Found

    @property
    def chosen(self) -> Found:
        """The shorter step; colocated where they are equal."""
        return self.disjoint if self.disjoint.seconds < self.colocated.seconds else self.colocated


def allocations(task: Task) -> Allocations:
    """The best allocations. Raises ConfigError where neither fits the devices."""
    apart = sorted(disjoint_sizes(task), key=lambda one: disjoint_bound(task, one))
    found = Allocations(
        task,
        best(task, iter(apart), disjoint, disjoint_bound),
        best(task, colocated_sizes(task), colocated),
    )
    if found.chosen.sizes is None:
        raise ConfigError(_too_small(task))
    return found


def colocated_sizes(task: Task) -> Iterator[Sizes]:
    """All that fill the devices."""
    for tensor, rows in itertools.product(task.costs.language.layers, ROWS):
        if task.devices % tensor == 0:
            one = Sizes(task.devices // tensor, tensor, 1, rows)
            yield one
            if one.data > 1:
                yield replace(one, shard="parameters")


def disjoint_sizes(task: Task) -> Iterator[Sizes]:
    """Encoders and language model on devices of their own, of which some may be idle."""
    language = task.costs.language
    for tensor, rows in itertools.product(language.layers, ROWS):
        for pipeline in range(1, min(DEEPEST, language.depth, task.devices // tensor) + 1):
            for data in range(1, task.devices // (tensor * pipeline) + 1):
                one = Sizes(data, tensor, pipeline, rows)
                if micro_batches(task.batch, one):
                    yield from _with_encoders(task, one)


def _with_encoders(task: Task, one: Sizes) -> Iterator[Sizes]:
    """With each number of devices of each encoder that divides a micro-batch."""
    micro = one.rows * one.data
    counts = [ranks for ranks in range(1, micro + 1) if micro % ranks == 0]
    for encoders in itertools.product(counts, repeat=len(task.costs.encoders)):
        if one.devices + sum(encoders) <= task.devices:
            yield replace(one, encoders=encoders)


def disjoint_bound(task: Task, one: Sizes) -> float:
    """No mean step of these sizes is shorter."""
    count = micro_batches(task.batch, one)
    work = count * max(sum(stage) for stage in language_stages(task, one))
    for at, (encoder, ranks) in enumerate(zip(task.costs.encoders, one.encoders, strict=True)):
        units = sum(row[at] for rows in task.steps for row in rows) / len(task.steps) / ranks
        constant = sum(line.constant for line in encoder.passes)
        slope = sum(line.slope for line in encoder.passes)
        work = max(work, slope * units + min(0.0, constant) * count)
    return work + once_of_parts(task, one)


def _too_small(task: Task) -> str:
    """What the sizes that need least memory need."""
    apart = [
        max(
            language_bytes(task, one, micro_batches(task.batch, one)),
            *(
                encoder_bytes(task, one, at, micro_batches(task.batch, one))
                for at in range(len(one.encoders))
            ),
        )
        for one in disjoint_sizes(task)
    ]
    need = min(
        [*apart, *(colocated_bytes(task, one) for one in colocated_sizes(task) if one.data)],
        default=math.inf,
    )
    if need <= task.capacity or math.isinf(need):
        return (
            f"no allocation on {task.devices} devices divides the {task.batch} rows of a step; give a batch that "
            "more numbers divide, such as a power of two"
        )
    return (
        f"no allocation fits {task.devices} devices of {format_bytes(task.capacity)} (usable): the smallest needs "
        f"{format_bytes(need)} on a device; give more devices (--devices), or a smaller batch or sequence"
    )
