"""Steps of an encoder and a language model on N devices, under several rules of placement. Everything is simulated.

- homogeneous: one mesh of data · tensor ranks in each pipeline stage; the encoder is in the first stage, with fewer
  layers of the language model beside it, and images of a micro-batch are dealt to its tensor ranks.
- Megatron's rule: the encoder has ranks of its own, whose data degree is a multiple or a divisor of the language
  model's; a replica's images are dealt to its encoder ranks, or an encoder rank serves several replicas.
- Cornstarch's rule: the encoder is a pipeline of stages of as many devices as the language model's, before them.
- ours: submodels: any number of encoder ranks, to which the images of a micro-batch of all replicas are dealt.

The first three take rows in the order in which they come, in 1F1B. Ours puts rows with as many images into the same
micro-batches, and makes the order of each step from its costs. Beside them stands `hyper-parallel train`, a homogeneous
mesh whose rows are dealt to replicas and micro-batches by their work. Each is the best of all sizes that fit the
devices and their memory, by the mean over the same steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from step_timing import time_step

from hyper_parallel.data.order import RowWork, dealt
from hyper_parallel.planner.submodels.search import DEEPEST, Step, disjoint
from hyper_parallel.planner.submodels.sizes import (
    Row,
    Sizes,
    Task,
    crossing,
    fits,
    language_bytes,
    language_stages,
    media_dealt,
    micro_batches,
    once_of_parts,
    once_seconds,
    stage_costs,
)
from hyper_parallel.schedule import Action, MicroBatchKind, Schedule, named_schedule
from hyper_parallel.workload.submodels import Times, added

DEGREES = (1, 2, 4, 8)
"""Of tensor parallelism."""
ROWS = (1, 2, 4)
"""Of a micro-batch on a data rank."""


def homogeneous_sizes(task: Task) -> Iterator[Sizes]:
    """All that fill the devices."""
    for tensor in DEGREES:
        for pipeline in range(1, task.devices // tensor + 1):
            if task.devices % (tensor * pipeline) == 0:
                yield from (
                    Sizes(task.devices // tensor // pipeline, tensor, pipeline, rows) for rows in ROWS
                )


def apart_sizes(task: Task, allowed: Callable[[Sizes], bool] = lambda _: True) -> Iterator[Sizes]:
    """Encoder and language model on devices of their own, which fill the devices."""
    for tensor, rows in itertools.product(DEGREES, ROWS):
        for pipeline in range(1, min(DEEPEST, task.devices // tensor) + 1):
            for data in range(1, task.devices // (tensor * pipeline) + 1):
                encoders = task.devices - data * tensor * pipeline
                one = Sizes(data, tensor, pipeline, rows, (encoders,))
                if encoders and allowed(one):
                    yield one


def megatron(one: Sizes) -> bool:
    """The data degree of one is a multiple of the other's."""
    return one.encoders[0] % one.data == 0 or one.data % one.encoders[0] == 0


def homogeneous(task: Task, one: Sizes, images: Sequence[Row], *, trained: bool = False) -> Step | None:
    """A step of one mesh. `trained`: as `hyper-parallel train` runs it: without a pipeline, rows are dealt to
    replicas and micro-batches, and each tensor rank has the whole encoder and all images of its micro-batch."""
    count = micro_batches(len(images), one)
    among = 1 if trained else one.tensor
    costs, cluster = task.costs, task.cluster
    whole = costs.encoders[0].parameters / among  # where so many tensor ranks hold a part of the encoder each
    if not count or (trained and one.pipeline > 1) or language_bytes(task, one, count, whole) > task.capacity:
        return None
    rows = _shown(images)
    mean = costs.encoders[0].seconds(sum(rows) / len(rows) * one.rows / among)
    if trained:
        row = sum(map(sum, costs.language.stages(1, one.tensor, 1)))
        work = [RowWork(row, sum(costs.encoders[0].seconds(shown))) for shown in rows]
        rows = [rows[place] for place in dealt(work, one.data, one.rows)]
    first, *others = language_stages(task, one, sum(mean))

    def stages_of(shown: float) -> tuple[list[Times], Sequence[float]]:
        return [added(first, _encoder(task, shown, among)), *others], ()

    longest, busy = _pipelines(one, _in_order(rows, one, count), stages_of)
    per_device = costs.language.parameters / (one.tensor * one.pipeline) + whole
    once = once_seconds(cluster, per_device, one.data, one.tensor)
    return Step(longest + once, busy)


def apart_in_order(task: Task, one: Sizes, images: Sequence[Row]) -> Step | None:
    """A step under Megatron's rule."""
    count = micro_batches(len(images), one)
    if not count or not fits(task, one, count):
        return None
    encoder, pipeline = task.costs.encoders[0], one.pipeline
    text = language_stages(task, one)
    # Ranks of the encoder that work as one: each serves a replica, or several.
    hosts = min(one.encoders[0], one.data)
    together, serves = one.encoders[0] // hosts, one.data // hosts
    plain = named_schedule("1f1b", pipeline + 1, count, 1)
    kinds, orders = [], [list[Action]() for _ in range(hosts + one.data * pipeline)]
    busy = 0.0
    for replica, shown_of in enumerate(_in_order(_shown(images), one, count)):
        ranks = [replica // serves, *(hosts + replica * pipeline + stage for stage in range(pipeline))]
        for shown in shown_of:
            times = encoder.seconds(math.ceil(shown / together))
            transfers = (crossing(task, encoder, shown, together), *[0.0] * (pipeline - 1))
            kinds.append(MicroBatchKind.chain(stage_costs([times, *text], transfers=transfers), ranks))
            busy += together * sum(times) + one.tensor * sum(map(sum, text))

    def ordered(action: Action, replica: int, stage: int) -> Action:
        number = replica * count + action.micro_batch
        return Action(action.kind, number * (pipeline + 1) + stage, number)

    for host in range(hosts):
        served = range(host * serves, (host + 1) * serves)
        orders[host] = [ordered(action, replica, 0) for action in plain.orders[0] for replica in served]
    for replica, stage in itertools.product(range(one.data), range(1, pipeline + 1)):
        order = [ordered(action, replica, stage) for action in plain.orders[stage]]
        orders[hosts + replica * pipeline + stage - 1] = order
    placement = tuple(rank for kind in kinds for rank in kind.placement)
    timed = time_step(kinds, Schedule("1f1b", placement, tuple(map(tuple, orders)), len(kinds)))
    return Step(timed.makespan + once_of_parts(task, one), busy)


def cornstarch(one: Sizes) -> bool:
    """Encoder stages of as many devices as the language model's."""
    return one.encoders[0] % (one.data * one.tensor) == 0


def encoder_pipeline(task: Task, one: Sizes, images: Sequence[Row]) -> Step | None:
    """A step under Cornstarch's rule."""
    count = micro_batches(len(images), one)
    if not count or not fits(task, one, count):
        return None
    encoder, text = task.costs.encoders[0], language_stages(task, one)
    depth = one.encoders[0] // (one.data * one.tensor)

    def stages_of(shown: float) -> tuple[list[Times], Sequence[float]]:
        forward, inputs, weights = encoder.seconds(math.ceil(shown / one.tensor))
        stages = [(forward / depth, inputs / depth, weights / depth)] * depth + text
        transfers = [0.0] * (len(stages) - 1)
        transfers[depth - 1] = crossing(task, encoder, shown, one.tensor)
        return stages, transfers

    longest, busy = _pipelines(one, _in_order(_shown(images), one, count), stages_of)
    return Step(longest + once_of_parts(task, one), busy)


def submodels(task: Task, one: Sizes, images: Sequence[Row]) -> Step | None:
    """A step of submodels whose images are dealt one by one."""
    return disjoint(task, one, images, media_dealt)


def _in_order(rows: Sequence[float], one: Sizes, count: int) -> list[list[float]]:
    """The images of each micro-batch of each replica, whose rows are taken as they come."""
    sums = [sum(rows[at * one.rows : (at + 1) * one.rows]) for at in range(one.data * count)]
    return [sums[replica * count : (replica + 1) * count] for replica in range(one.data)]


def _pipelines(
    one: Sizes,
    images: Sequence[Sequence[float]],
    stages_of: Callable[[float], tuple[list[Times], Sequence[float]]],
) -> tuple[float, float]:
    """Seconds of the longest replica's pipeline in 1F1B, and those in which devices compute, of all. `stages_of`: the
    times of a micro-batch's stages and of the transfers between them, by its images."""
    longest = busy = 0.0
    for replica in images:
        kinds = []
        for shown in replica:
            stages, transfers = stages_of(shown)
            kinds.append(MicroBatchKind.chain(stage_costs(stages, transfers=transfers), range(len(stages))))
            busy += one.tensor * sum(map(sum, stages))
        timed = time_step(kinds, _one_f_one_b(len(kinds[0].placement), len(kinds)))
        longest = max(longest, timed.makespan)
    return longest, busy


def _encoder(task: Task, shown: float, tensor: int) -> Times:
    """Of images that are dealt to the tensor ranks of a stage, which gather the features."""
    times = task.costs.encoders[0].seconds(math.ceil(shown / tensor))
    if tensor == 1 or not shown:
        return times
    features = shown * task.costs.encoders[0].features
    gathered = task.cluster.collective_seconds("all_gather", features, range(tensor))
    return times[0] + gathered, times[1] + gathered, times[2]


def _shown(images: Sequence[Row]) -> list[float]:
    """Of the one encoder."""
    return [row[0] for row in images]


def _one_f_one_b(ranks: int, count: int) -> Schedule:
    """1F1B of micro-batches that are each of a kind."""
    plain = named_schedule("1f1b", ranks, count, 1)
    orders = tuple(
        tuple(Action(one.kind, one.micro_batch * ranks + one.stage, one.micro_batch) for one in order)
        for order in plain.orders
    )
    return Schedule("1f1b", tuple(range(ranks)) * count, orders, count)
