"""Devices of the parts of a multimodal model: whether their memory suffices, and the stages that micro-batches pass.

bytes of a rank = parameters · (whole + sharded / copies) + micro-batches in flight · saved + workspace
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hyper_parallel.cluster import Cluster
from hyper_parallel.schedule import Costs, MicroBatchKind
from hyper_parallel.strategy.memory import ShardLevel
from hyper_parallel.workload.submodels import (
    EncoderCosts,
    ModelCosts,
    Times,
    added,
    seconds_of,
    with_partners,
)

WORD = "simulated"
"""The kind of an answer's times."""
USABLE = 0.9
"""Of a device's memory."""

Row = tuple[float, ...]
"""Units of each encoder."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a parameter, with its gradient and the optimizer's state."""

    whole: float
    """On every copy."""
    sharded: float
    """Over all copies together."""
    twice: float = 0.0
    """Of these, what one copy alone does not need: a gradient before and after its reduction."""

    def of(self, parameters: float, copies: int) -> float:
        """On each of the copies of this number of parameters."""
        return parameters * (self.whole + self.sharded / copies - (self.twice if copies == 1 else 0.0))


MIXED = StateBytes(whole=6, sharded=16, twice=4)
"""Weights in bfloat16 and gradients in float32 on every copy; float32 weights, reduced gradients and both moments of
Adam over all (`memory.shard: optimizer`)."""
CAPTURED = StateBytes(whole=8, sharded=16, twice=4)
"""As `MIXED` in a captured step, which also has the gradients of one micro-batch, in bfloat16."""


@dataclass(frozen=True)
class Sizes:
    """How devices are used."""

    data: int
    tensor: int
    pipeline: int
    rows: int
    """Of a micro-batch on a data rank."""
    encoders: tuple[int, ...] = ()
    """Devices of each encoder alone; none where encoders are beside the language model."""
    shard: ShardLevel = "optimizer"
    """ZeRO level."""

    @property
    def language(self) -> int:
        """Devices of the language model."""
        return self.data * self.tensor * self.pipeline

    @property
    def devices(self) -> int:
        """All."""
        return self.language + sum(self.encoders)

    def __str__(self) -> str:
        degrees = {"data": self.data, "tensor": self.tensor, "pipeline": self.pipeline}
        text = " · ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "1 device"
        apart = f"encoder {' + '.join(map(str, self.encoders))}, language " if self.encoders else ""
        return f"{apart}{text}, {self.rows} rows"


@dataclass(frozen=True)
class Task:
    """A set of steps on a cluster."""

    costs: ModelCosts
    cluster: Cluster
    devices: int
    steps: Sequence[Sequence[Row]]
    state: StateBytes = CAPTURED
    """Of parts on devices of their own."""
    largest: Row = ()
    """The most units of each encoder in a row of all data; of the steps when left out."""

    @property
    def capacity(self) -> float:
        """Bytes of a device that a part may take."""
        device = self.cluster.device
        assert device is not None, "a cluster that is planned for has a device"
        return USABLE * device.memory.bytes / device.memory.ranks

    @property
    def batch(self) -> int:
        """Rows of a step."""
        return len(self.steps[0])

    def most(self, encoder: int) -> float:
        """The most units that a row has."""
        found = [row[encoder] for rows in self.steps for row in rows]
        return max([*found, *self.largest[encoder : encoder + 1]])


def micro_batches(rows: int, one: Sizes) -> int:
    """Micro-batches of a replica for the rows of a step; 0 where rows do not divide."""
    size = one.data * one.rows
    return 0 if rows % size else rows // size


def in_flight(one: Sizes, count: int) -> int:
    """Micro-batches of `count` that a stage holds at most, in the order of 1F1B."""
    return min(count, one.pipeline + (1 if one.encoders else 0))


def language_bytes(task: Task, one: Sizes, count: int, besides: float = 0.0) -> float:
    """Bytes of a rank of the language model. `besides`: parameters that each rank has of other parts."""
    language, held = task.costs.language, in_flight(one, count)
    saved = language.saved[one.tensor](one.rows) / one.pipeline
    parameters = language.parameters / (one.tensor * one.pipeline) + besides
    return task.state.of(parameters, one.data) + held * saved + language.workspace[one.tensor](one.rows)


def encoder_bytes(task: Task, one: Sizes, encoder: int, count: int) -> float:
    """Bytes of a rank of an encoder on its own devices, for micro-batches of the rows with most."""
    costs, copies = task.costs.encoders[encoder], one.encoders[encoder]
    units = task.most(encoder) * one.rows * one.data / copies
    held = in_flight(one, count) * costs.saved(units)
    return task.state.of(costs.parameters, copies) + held + costs.workspace(units)


def colocated_bytes(task: Task, one: Sizes) -> float:
    """Bytes of a rank that has a part of the language model and all encoders, for a micro-batch of the rows with most.

    At level `parameters` a rank holds whole, in turn, two layers and all that is outside of them; what the encoders
    have is outside.
    """
    costs, language = task.costs, task.costs.language
    encoders = sum(one.parameters for one in costs.encoders)
    layers = (language.parameters - language.outside) / one.tensor
    outside = language.outside / one.tensor + encoders
    units = [task.most(at) * one.rows for at in range(len(costs.encoders))]
    saved = sum(each.saved(of) for each, of in zip(costs.encoders, units, strict=True))
    saved += language.saved[one.tensor](one.rows)
    workspace = max(
        language.workspace[one.tensor](one.rows) + language.recomputed[one.tensor](one.rows),
        *(each.workspace(of) for each, of in zip(costs.encoders, units, strict=True)),
    )
    if one.shard == "optimizer":
        return MIXED.of(layers + outside, one.data) + saved + workspace
    kept = MIXED.of(layers + outside, one.data) - MIXED.whole * (layers + outside)
    gathered = MIXED.whole * (outside + layers * min(1.0, 2 / language.depth))
    return kept + gathered + saved + workspace


def fits(task: Task, one: Sizes, count: int) -> bool:
    """Whether parts on devices of their own fit."""
    need = [language_bytes(task, one, count)]
    need += [encoder_bytes(task, one, at, count) for at in range(len(one.encoders))]
    return max(need) <= task.capacity


def optimizer_seconds(cluster: Cluster, parameters: float, copies: int) -> float:
    """Seconds of an update of a share of the parameters, which the memory's rate bounds: 28 bytes of each."""
    assert cluster.device is not None, "a cluster that is planned for has a device"
    return 28 * parameters / copies / cluster.device.memory.read


def once_seconds(cluster: Cluster, parameters: float, copies: int, apart: int) -> float:
    """Seconds of the sum of gradients, of the optimizer, and of gathering weights; ranks lie `apart` from another."""
    ranks = range(0, copies * apart, apart)
    # Each rank gives all of its gradients, and its share of the weights.
    moved = sum(
        cluster.collective_seconds(kind, size, ranks)
        for kind, size in (("reduce_scatter", 2 * parameters), ("all_gather", 2 * parameters / copies))
    )
    return (moved if copies > 1 else 0.0) + optimizer_seconds(cluster, parameters, copies)


def once_of_parts(task: Task, one: Sizes) -> float:
    """Seconds once a step, of the part that takes longest."""
    language = task.costs.language
    own = once_seconds(task.cluster, language.parameters / (one.tensor * one.pipeline), one.data, one.tensor)
    others = [
        once_seconds(task.cluster, each.parameters, copies, 1)
        for each, copies in zip(task.costs.encoders, one.encoders, strict=True)
    ]
    return max(own, *others)


def crossing(task: Task, encoder: EncoderCosts, units: float, senders: int) -> float:
    """Seconds in which each rank of an encoder sends its part of the features of these units to another node."""
    if not units:
        return 0.0
    size = units * encoder.features / senders
    return task.cluster.collective_seconds("send", size, (0, task.devices - 1))


Share = Callable[[Sizes, Sequence[Row]], Counter[Row] | None]
"""A step's rows to the units of each encoder that its ranks have in a micro-batch, and in how many micro-batches."""


def media_dealt(one: Sizes, rows: Sequence[Row]) -> Counter[Row]:
    """Rows with as much media in the same micro-batches, whose media are dealt to the ranks of an encoder one by one,
    whatever row they are of."""
    ordered, size = sorted(rows, key=_media, reverse=True), one.rows * one.data
    parts = (ordered[first : first + size] for first in range(0, len(ordered), size))
    return Counter(
        tuple(
            math.ceil(sum(units) / ranks)
            for units, ranks in zip(zip(*part, strict=True), one.encoders, strict=True)
        )
        for part in parts
    )


def rows_dealt(one: Sizes, rows: Sequence[Row]) -> Counter[Row] | None:
    """As `train` does: whole rows are dealt to the ranks of each part, which must all have as much; rows without a
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


def allocation(task: Task, sizes: Sizes) -> str:
    """Devices and axes of each part, in words."""
    degrees = {"data": sizes.data, "tensor": sizes.tensor, "pipeline": sizes.pipeline}
    text = " · ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "1 device"
    if not sizes.encoders:
        return f"all parts {text}, shard: {sizes.shard}"
    encoders = [
        f"{each.name} {count}" for each, count in zip(task.costs.encoders, sizes.encoders, strict=True)
    ]
    return ", ".join([*encoders, f"language {text}"])


def memory_of_parts(task: Task, sizes: Sizes) -> dict[str, float]:
    """Part to the bytes of a device that has it."""
    if not sizes.encoders:
        return {"all parts": colocated_bytes(task, sizes)}
    count = micro_batches(task.batch, sizes)
    found = {each.name: encoder_bytes(task, sizes, at, count) for at, each in enumerate(task.costs.encoders)}
    return {**found, "language": language_bytes(task, sizes, count)}
