"""The best sizes of parts on devices of their own, and the best of one mesh for all parts.

Sizes are taken in the order of a lower bound of their steps, and the search ends where no bound is below the best:

    bound = max over parts of Σ their work in a step / their devices  +  what they do once a step
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from hyper_parallel.data.order import RowWork, dealt
from hyper_parallel.errors import ConfigError
from hyper_parallel.planner.submodels.expansion import timeline_of
from hyper_parallel.planner.submodels.sizes import (
    Row,
    Share,
    Sizes,
    Task,
    colocated_bytes,
    encoder_bytes,
    fits,
    language_bytes,
    language_stages,
    micro_batch_kinds,
    micro_batches,
    once_of_parts,
    once_seconds,
    optimizer_seconds,
    rows_dealt,
)
from hyper_parallel.schedule import MicroBatchKind, Schedule, step_schedule
from hyper_parallel.trace import Timeline
from hyper_parallel.units import format_bytes

# A step of a model whose parts lie on devices of their own, and one in which each rank has all encoders: simulated.
#
#     disjoint     the step's micro-batches in the order that `hp.submodels` makes of their costs (`step_schedule`), by
#                  the clock of that order while sizes are compared; the best sizes' step is simulated (`expansion`)
#     colocated    Σ over a rank's micro-batches of encoders + language model, rows dealt to data ranks by their work
#
# Data ranks of a colocated mesh wait for each other once a step, or in every micro-batch where weights are gathered in
# it (`shard: parameters`); a micro-batch then takes as long as its computation or its collectives, whichever is longer.


@dataclass(frozen=True)
class MicroBatchTimes:
    """Times of a micro-batch on a colocated rank."""

    encoders: float
    language: float
    language_forward: float
    """Of the language model's seconds, those of the forward pass."""
    exposed: float = 0.0
    """Seconds of collectives that computation does not hide."""
    waits: float = 0.0
    """Until the slowest data rank is there."""


@dataclass(frozen=True)
class Step:
    """The outcome of a step."""

    seconds: float
    busy: float
    """Device-seconds of computation, and of collectives in a stage."""
    once: float = 0.0
    """Seconds once a step: reductions, update, gathers."""
    kinds: Sequence[MicroBatchKind] = ()
    schedule: Schedule | None = None
    """Of a step of parts on devices of their own."""
    timeline: Timeline | None = None
    """Of such a step that was simulated."""
    ranks: Sequence[Sequence[MicroBatchTimes]] = field(default=())
    """Of a colocated step, by data rank."""


def disjoint(task: Task, one: Sizes, rows: Sequence[Row], share: Share = rows_dealt) -> Step | None:
    """A step of parts on devices of their own; None where the sizes do not divide the rows or do not fit."""
    count = micro_batches(len(rows), one)
    if not count or not fits(task, one, count):
        return None
    shared: Counter[Row] | None = share(one, rows)
    if shared is None:
        return None
    kinds = micro_batch_kinds(task, one, shared)
    apart = len(one.encoders)
    found = step_schedule(kinds, one.pipeline + apart)
    busy = sum(
        kind.count * kind.work(stage) * (one.encoders[rank] if rank < apart else one.data * one.tensor)
        for kind in kinds
        for stage, rank in enumerate(kind.placement)
    )
    once = once_of_parts(task, one)
    return Step(found.makespan + once, busy, once, kinds, found.schedule)


def colocated(task: Task, one: Sizes, rows: Sequence[Row]) -> Step | None:
    """A step of one mesh, as `hyper-parallel train` runs it: each rank has all encoders whole, and rows are dealt to
    data ranks and micro-batches by their work. None where the sizes do not divide the rows or do not fit."""
    count = micro_batches(len(rows), one)
    if not count or colocated_bytes(task, one) > task.capacity:
        return None
    costs = task.costs
    (stage,) = language_stages(task, one)
    language = sum(stage)

    @cache
    def encoders(units: Row) -> float:
        pairs = zip(costs.encoders, units, strict=True)
        return sum(sum(encoder.seconds(of)) for encoder, of in pairs)

    work = [RowWork(language / one.rows, encoders(row)) for row in rows]
    order = [rows[place] for place in dealt(work, one.data, one.rows)]
    own = [order[rank * count * one.rows : (rank + 1) * count * one.rows] for rank in range(one.data)]
    parts = [[part[at : at + one.rows] for at in range(0, len(part), one.rows)] for part in own]
    units = [[tuple(map(sum, zip(*micro, strict=True))) for micro in part] for part in parts]
    moved = _collectives(task, one)

    def timed(of: Row) -> MicroBatchTimes:
        computing = encoders(of)
        return MicroBatchTimes(computing, language, stage[0], max(0.0, moved - (computing + language)))

    ranks = [[timed(of) for of in part] for part in units]
    busy = one.tensor * sum(micro.encoders + micro.language for part in ranks for micro in part)
    per_device = costs.language.parameters / one.tensor + sum(each.parameters for each in costs.encoders)
    if one.shard == "optimizer":
        once = once_seconds(task.cluster, per_device, one.data, one.tensor)
        return Step(max(map(_total, ranks)) + once, busy, once, ranks=_waiting([ranks], one.data))
    once = optimizer_seconds(task.cluster, per_device, one.data)
    together = [[[part[at]] for part in ranks] for at in range(count)]
    waited = _waiting(together, one.data)
    return Step(_total(waited[0]) + once, busy, once, ranks=waited)


def _collectives(task: Task, one: Sizes) -> float:
    """Seconds of gathers and reductions in each micro-batch: weights of layers for both passes, all others once."""
    if one.shard == "optimizer" or one.data == 1:
        return 0.0
    language = task.costs.language
    outside = language.outside / one.tensor + sum(each.parameters for each in task.costs.encoders)
    layers = (language.parameters - language.outside) / one.tensor
    ranks = range(0, one.data * one.tensor, one.tensor)
    gathered = task.cluster.collective_seconds("all_gather", 2 * (2 * layers + outside) / one.data, ranks)
    return gathered + task.cluster.collective_seconds("reduce_scatter", 4 * (layers + outside), ranks)


def _total(part: Sequence[MicroBatchTimes]) -> float:
    return sum(one.encoders + one.language + one.exposed + one.waits for one in part)


def _waiting(
    together: Sequence[Sequence[Sequence[MicroBatchTimes]]], ranks: int
) -> list[list[MicroBatchTimes]]:
    """By data rank, with the waits at the end of each stretch [stretch][rank][micro-batch]."""
    found: list[list[MicroBatchTimes]] = [[] for _ in range(ranks)]
    for stretch in together:
        longest = max(map(_total, stretch))
        for own, part in zip(found, stretch, strict=True):
            own += [*part[:-1], replace(part[-1], waits=longest - _total(part))]
    return found


ROWS = (1, 2, 4, 8)
"""Of a micro-batch on a data rank."""
DEEPEST = 16
"""Stages of a pipeline."""


@dataclass
class BestSizes:
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
) -> BestSizes:
    """The best of all sizes, by the mean of the same steps. With `bound`, by which `sizes` are sorted, the search ends
    early."""
    found = BestSizes()
    for one in sizes:
        if bound is not None and bound(task, one) >= found.seconds:
            break
        steps: list[Step] = []
        for rows in task.steps:
            outcome = step(task, one, rows)
            if outcome is None:
                break
            steps.append(outcome)
        if len(steps) < len(task.steps):
            continue
        found.tried += 1
        seconds = sum(outcome.seconds for outcome in steps)
        if seconds < found.seconds * len(steps):
            busy = sum(outcome.busy for outcome in steps)
            found.sizes, found.seconds, found.steps = one, seconds / len(steps), steps
            found.bubbles = 1 - busy / (task.devices * seconds)
    return found


@dataclass(frozen=True)
class Allocations:
    """The best of both."""

    task: Task
    disjoint: BestSizes
    colocated: BestSizes

    @property
    def chosen(self) -> BestSizes:
        """The shorter step; colocated where they are equal."""
        return self.disjoint if self.disjoint.seconds < self.colocated.seconds else self.colocated

    @property
    def named(self) -> tuple[tuple[str, BestSizes], ...]:
        """Both, by name."""
        return ("disjoint", self.disjoint), ("colocated", self.colocated)


def allocations(task: Task) -> Allocations:
    """The best allocations. Raises ConfigError where neither fits the devices."""
    apart = sorted(disjoint_sizes(task), key=lambda one: disjoint_bound(task, one))
    found = Allocations(
        task,
        predicted(task, best(task, iter(apart), disjoint, disjoint_bound)),
        best(task, colocated_sizes(task), colocated),
    )
    if found.chosen.sizes is None:
        raise ConfigError(_too_small(task))
    return found


def predicted(task: Task, found: BestSizes) -> BestSizes:
    """Parts on devices of their own with simulated steps (`submodels.expansion`)."""
    sizes = found.sizes
    if sizes is None:
        return found
    steps = [_simulated(task, sizes, rows, step) for rows, step in zip(task.steps, found.steps, strict=True)]
    seconds = sum(step.seconds for step in steps)
    bubbles = 1 - sum(step.busy for step in steps) / (task.devices * seconds)
    return replace(found, seconds=seconds / len(steps), bubbles=bubbles, steps=steps)


def _simulated(task: Task, one: Sizes, rows: Sequence[Row], step: Step) -> Step:
    shared = rows_dealt(one, rows)
    assert shared is not None, "the sizes divide the rows"
    assert step.schedule is not None, "a step of parts on devices of their own"
    timeline = timeline_of(task, one, shared, step.kinds, step.schedule)
    ranks = Counter(timeline.trace.classes.values())
    busy = sum(
        ranks[timeline.trace.classes[span.rank]] * (span.end - span.start)
        for span in timeline.spans
        if span.op.work is not None and span.op.phase != "optimizer"
    )
    return replace(step, seconds=timeline.step, busy=busy, timeline=timeline)


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
