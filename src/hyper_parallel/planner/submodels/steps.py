"""A step of a model whose parts lie on devices of their own, and one in which each rank has all encoders: simulated.

    disjoint     the step's micro-batches in the order that `hp.submodels` makes of their costs (`step_schedule`)
    colocated    Σ over a rank's micro-batches of encoders + language model, rows dealt to data ranks by their work

Data ranks of a colocated mesh wait for each other once a step, or in every micro-batch where weights are gathered in
it (`shard: parameters`); a micro-batch then takes as long as its computation or its collectives, whichever is longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from hyper_parallel.data.dealing import RowWork, dealt
from hyper_parallel.planner.submodels.sizes import (
    Row,
    Sizes,
    Task,
    colocated_bytes,
    fits,
    micro_batches,
    once_of_parts,
    once_seconds,
    optimizer_seconds,
)
from hyper_parallel.planner.submodels.stages import Share, language_stages, micro_batch_kinds, rows_dealt
from hyper_parallel.schedule import MicroBatchKind, Schedule, step_schedule
from hyper_parallel.workload.part_costs import Times


@dataclass(frozen=True)
class MicroBatchTimes:
    """Of a micro-batch on a colocated rank."""

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
    """What a step came to."""

    seconds: float
    busy: float
    """Device-seconds of computation, and of collectives in a stage."""
    once: float = 0.0
    """Seconds once a step: reductions, update, gathers."""
    kinds: Sequence[MicroBatchKind] = ()
    schedule: Schedule | None = None
    """Of a step of parts on devices of their own, as `time_step` takes them."""
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
    ranks = [[_timed(encoders(of), stage, moved) for of in part] for part in units]
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
    gathered = task.cluster.collective_seconds("all_gather", 2 * (2 * layers + outside), ranks)
    return gathered + task.cluster.collective_seconds("reduce_scatter", 4 * (layers + outside), ranks)


def _timed(encoders: float, language: Times, moved: float) -> MicroBatchTimes:
    hidden = encoders + sum(language)
    return MicroBatchTimes(encoders, sum(language), language[0], max(0.0, moved - hidden))


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
