"""Stages of micro-batches whose parts lie on devices of their own, in the terms of `schedule`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from hyper_parallel.planner.submodels.sizes import Row, Sizes, Task, crossing
from hyper_parallel.schedule import Costs, MicroBatchKind
from hyper_parallel.workload.part_costs import Times, added, seconds_of
from hyper_parallel.workload.row_partners import with_partners

Share = Callable[[Sizes, Sequence[Row]], Counter[Row] | None]
"""A step's rows to the units of each encoder that its ranks have in a micro-batch, and in how many micro-batches."""


def media_dealt(one: Sizes, rows: Sequence[Row]) -> Counter[Row]:
    """Rows with as much media in the same micro-batches, whose media are dealt to the ranks of an encoder one by one,
    whatever row they are of."""
    ordered, size = _by_media(rows), one.rows * one.data
    parts = (ordered[first : first + size] for first in range(0, len(ordered), size))
    return Counter(
        tuple(
            math.ceil(sum(units) / ranks)
            for units, ranks in zip(zip(*part, strict=True), one.encoders, strict=True)
        )
        for part in parts
    )


def rows_dealt(one: Sizes, rows: Sequence[Row]) -> Counter[Row] | None:
    """As `train` does: whole rows are dealt to the ranks of each part, all of which must have as much; rows without a
    partner are computed twice. None where the ranks do not divide a micro-batch."""
    size, most = one.rows * one.data, math.lcm(one.data, *one.encoders)
    if size % most:
        return None
    ordered = [row for row, _ in with_partners(rows, _media, most, size)]
    found: Counter[Row] = Counter()
    for first in range(0, len(ordered), size):
        part = ordered[first : first + size : most]
        found[
            tuple(sum(row[at] for row in part) * most / ranks for at, ranks in enumerate(one.encoders))
        ] += 1
    return found


def copies(one: Sizes, rows: Sequence[Row]) -> float:
    """The share of the rows that a step computes which are copies without loss."""
    dealt = with_partners(rows, _media, math.lcm(one.data, *one.encoders), one.rows * one.data)
    return sum(not bears_loss for _, bears_loss in dealt) / len(dealt)


def _by_media(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=_media, reverse=True)


def _media(row: Row) -> tuple[float, Row]:
    return sum(row), row


def micro_batch_kinds(task: Task, one: Sizes, shared: Counter[Row]) -> list[MicroBatchKind]:
    """The micro-batches of a step: each encoder is a rank of the schedule, followed by the stages of the language
    model. `shared`: the units of each rank of each encoder, and in how many micro-batches."""
    text = language_stages(task, one)
    border = _border(task, one)
    encoders = task.costs.encoders
    kinds = []
    for units, count in sorted(shared.items(), reverse=True):
        there = [at for at, of in enumerate(units) if of]
        stages = [*(encoders[at].seconds(units[at]) for at in there), *text]
        saved = [*(encoders[at].saved(units[at]) for at in there), *language_saved(task, one)]
        first = len(there)
        edges = {
            (place, first): crossing(task, encoders[at], units[at] * one.encoders[at], one.encoders[at])
            for place, at in enumerate(there)
        }
        edges |= {(first + stage, first + stage + 1): border for stage in range(one.pipeline - 1)}
        kinds.append(
            MicroBatchKind(
                stage_costs(stages, saved),
                (*there, *(len(encoders) + stage for stage in range(one.pipeline))),
                edges,
                {(target, source): seconds for (source, target), seconds in edges.items()},
                count,
            )
        )
    return kinds


def stage_costs(
    stages: Sequence[Times], saved: Sequence[float] = (), transfers: Sequence[float] = ()
) -> Costs:
    """Seconds of stages, and bytes that a micro-batch keeps, in the schedule's terms."""
    return Costs(
        forward=tuple(one[0] for one in stages),
        backward=tuple(one[1] + one[2] for one in stages),
        input=tuple(one[1] for one in stages),
        weight=tuple(one[2] for one in stages),
        transfers=tuple(transfers),
        saved=tuple(saved),
    )


def language_saved(task: Task, one: Sizes) -> list[float]:
    """Bytes of a micro-batch in each stage of the language model."""
    return [task.costs.language.saved[one.tensor](one.rows) / one.pipeline] * one.pipeline


def language_stages(task: Task, one: Sizes, besides: float = 0.0) -> list[Times]:
    """The stages of the language model, whose layers are dealt so that all take as long as far as they go: the last
    one has the head, and the first one what is beside it, `besides` seconds on the mean."""
    language = task.costs.language
    layers = seconds_of(language.layers[one.tensor], one.rows)
    head = seconds_of(language.head[one.tensor], one.rows)
    heights = [0.0] * one.pipeline
    heights[0] += besides
    heights[-1] += sum(head)
    shares = [max(0.0, _level(sum(layers), heights) - height) / sum(layers) for height in heights]
    stages: list[Times] = [(layers[0] * share, layers[1] * share, layers[2] * share) for share in shares]
    return [*stages[:-1], added(stages[-1], head)]


def _level(amount: float, heights: Sequence[float]) -> float:
    """Water is filled in from the lowest stage up: how high it stands."""
    left = amount
    ordered = sorted(heights)
    for count, height in enumerate(ordered, 1):
        above = ordered[count] if count < len(ordered) else math.inf
        if left <= (above - height) * count:
            return height + left / count
        left -= (above - height) * count
    return 0.0


def _border(task: Task, one: Sizes) -> float:
    """Seconds in which hidden states go from a stage of the language model to the next one."""
    size = task.costs.language.border * one.rows
    return task.cluster.collective_seconds("send", size, (0, task.devices - 1)) if size else 0.0
