"""Steps of an encoder and a language model on N devices, under several rules of placement. Everything is simulated.

- homogeneous: one mesh of data · tensor ranks in each pipeline stage; the encoder is in the first stage, with fewer
  layers of the language model beside it, and images of a micro-batch are dealt to its tensor ranks.
- Megatron's rule: the encoder has ranks of its own, whose data degree is a multiple or a divisor of the language
  model's; a replica's images are dealt to its encoder ranks, or an encoder rank serves several replicas.
- Cornstarch's rule: the encoder is a pipeline of stages of as many devices as the language model's, before them.
- ours: `hp.submodels`: any number of encoder ranks, to which the images of a micro-batch of all replicas are dealt.

The first three take rows in the order in which they come, in 1F1B. Ours puts rows with as many images into the same
micro-batches, and makes the order of each step from its costs. Beside them stands `hyper-parallel train`, a homogeneous
mesh whose rows are dealt to replicas and micro-batches by their work. Each is the best of all sizes that fit the
devices and their memory, by the mean over the same steps.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from unlike_costs import DEGREES, ModelCosts

from hyper_parallel.cluster import Cluster
from hyper_parallel.data.dealing import RowWork, dealt
from hyper_parallel.schedule import (
    Action,
    Costs,
    MicroBatchKind,
    Schedule,
    named_schedule,
    step_schedule,
    time_step,
)

Times = tuple[float, float, float]
"""Forward pass, gradients of inputs, gradients of weights."""
ROWS = (1, 2, 4)
"""Of a micro-batch on a data rank."""
DEEPEST = 16
"""Stages of a pipeline."""
USABLE = 0.9
"""Of a device's memory."""
WORKSPACE = 6 * 2**30
"""Bytes of a layer's activations, logits of a chunk, and buffers: an estimate."""


@dataclass(frozen=True)
class Sizes:
    """How devices are used."""

    data: int
    tensor: int
    pipeline: int
    rows: int
    """Of a micro-batch on a data rank."""
    encoders: int = 0
    """Devices of the encoder alone."""

    @property
    def devices(self) -> int:
        """All."""
        return self.data * self.tensor * self.pipeline + self.encoders

    def __str__(self) -> str:
        degrees = {"data": self.data, "tensor": self.tensor, "pipeline": self.pipeline}
        text = " · ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "1 device"
        apart = f"encoder {self.encoders}, language " if self.encoders else ""
        return f"{apart}{text}, {self.rows} rows"


@dataclass(frozen=True)
class Step:
    """What a step came to."""

    seconds: float
    busy: float
    """Device-seconds of computation, and of collectives in a stage."""


@dataclass(frozen=True)
class Task:
    """A set of steps on a cluster."""

    costs: ModelCosts
    cluster: Cluster
    devices: int
    steps: Sequence[Sequence[int]]
    """Images of each row of each step."""


@dataclass
class Found:
    """The best sizes of a rule."""

    sizes: Sizes | None = None
    seconds: float = math.inf
    bubbles: float = 1.0
    """Of the devices' time: the share in which they compute nothing."""
    tried: int = field(default=0)


def best(
    task: Task, sizes: Iterator[Sizes], step: Callable[[Task, Sizes, Sequence[int]], Step | None]
) -> Found:
    """Of all sizes."""
    found = Found()
    for one in sizes:
        steps = [step(task, one, images) for images in task.steps]
        known = [made for made in steps if made is not None]
        if len(known) < len(steps):
            continue
        found.tried += 1
        seconds = sum(made.seconds for made in known)
        if seconds < found.seconds * len(steps):
            busy = sum(made.busy for made in known)
            found.sizes, found.seconds = one, seconds / len(steps)
            found.bubbles = 1 - busy / (task.devices * seconds)
    return found


def homogeneous_sizes(task: Task) -> Iterator[Sizes]:
    """All that fill the devices."""
    for tensor in DEGREES:
        for pipeline in _divisors(task.devices // tensor if task.devices % tensor == 0 else 0):
            for rows in ROWS:
                yield Sizes(task.devices // tensor // pipeline, tensor, pipeline, rows)


def apart_sizes(task: Task, allowed: Callable[[Sizes], bool] = lambda _: True) -> Iterator[Sizes]:
    """Encoder and language model on devices of their own, which fill the devices."""
    for tensor, rows in itertools.product(DEGREES, ROWS):
        for pipeline in range(1, min(DEEPEST, task.devices // tensor) + 1):
            for data in range(1, task.devices // (tensor * pipeline) + 1):
                encoders = task.devices - data * tensor * pipeline
                one = Sizes(data, tensor, pipeline, rows, encoders)
                if encoders and allowed(one):
                    yield one


def megatron(one: Sizes) -> bool:
    """The data degree of one is a multiple of the other's."""
    return one.encoders % one.data == 0 or one.data % one.encoders == 0


def homogeneous(task: Task, one: Sizes, images: Sequence[int], *, trained: bool = False) -> Step | None:
    """A step of one mesh. `trained`: as `hyper-parallel train` runs it: without a pipeline, rows are dealt to
    replicas and micro-batches, and each tensor rank has the whole encoder and all images of its micro-batch."""
    count = _micro_batches(images, one)
    among = 1 if trained else one.tensor
    if not count or not _fits(task, one, count, among) or (trained and one.pipeline > 1):
        return None
    costs, cluster = task.costs, task.cluster
    rows = list(images)
    if trained:
        row = sum(map(sum, costs.seconds_of_rows(1, one.tensor, 1)))
        work = [RowWork(row, sum(costs.seconds_of_images(shown))) for shown in images]
        rows = [images[place] for place in dealt(work, one.data, one.rows)]
    mean = costs.seconds_of_images(sum(images) / len(images) * one.rows / among)
    stages = _stages(task, one, sum(mean))
    longest = busy = 0.0
    for replica in range(one.data):
        own = rows[replica * count * one.rows : (replica + 1) * count * one.rows]
        micro = []
        for m in range(count):
            shown = sum(own[m * one.rows : (m + 1) * one.rows])
            encoder = _encoder(task, shown, among)
            micro.append([_added(stages[0], encoder), *stages[1:]])
        kinds = [MicroBatchKind.chain(_costs(times), range(one.pipeline)) for times in micro]
        timed = time_step(kinds, _one_f_one_b(one.pipeline, count))
        longest = max(longest, timed.makespan)
        busy += one.tensor * sum(sum(times) for stage in micro for times in stage)
    per_device = costs.text_parameters / (one.tensor * one.pipeline) + costs.vision_parameters / among
    once = _once(cluster, per_device, one.data, one.tensor)
    return Step(longest + once, busy)


def apart_in_order(task: Task, one: Sizes, images: Sequence[int]) -> Step | None:
    """A step under Megatron's rule."""
    count = _micro_batches(images, one)
    if not count or not _fits(task, one, count):
        return None
    costs, pipeline = task.costs, one.pipeline
    text = _stages(task, one)
    hosts = min(one.encoders, one.data)
    """Ranks of the encoder that work as one: each serves a replica, or several."""
    together, serves = one.encoders // hosts, one.data // hosts
    kinds, orders = [], [[] for _ in range(hosts + one.data * pipeline)]
    busy = 0.0
    stage_of: dict[tuple[int, int], int] = {}
    for replica, m in itertools.product(range(one.data), range(count)):
        first = (replica * count + m) * one.rows
        shown = sum(images[first : first + one.rows])
        encoder = costs.seconds_of_images(math.ceil(shown / together))
        own = [hosts + replica * pipeline + stage for stage in range(pipeline)]
        stage_of[replica, m] = len(kinds) * (pipeline + 1)
        transfers = (_crossing(task, shown, together), *[0.0] * (pipeline - 1))
        kinds.append(MicroBatchKind.chain(_costs([encoder, *text], transfers), [replica // serves, *own]))
        busy += together * sum(encoder) + one.tensor * sum(map(sum, text))
    plain = named_schedule("1f1b", pipeline + 1, count, 1)
    for host in range(hosts):
        for action in plain.orders[0]:
            for replica in range(host * serves, (host + 1) * serves):
                m = action.micro_batch
                orders[host].append(Action(action.kind, stage_of[replica, m], replica * count + m))
    for replica, stage in itertools.product(range(one.data), range(pipeline)):
        for action in plain.orders[1 + stage]:
            m = action.micro_batch
            number = stage_of[replica, m] + 1 + stage
            orders[hosts + replica * pipeline + stage].append(
                Action(action.kind, number, replica * count + m)
            )
    placement = tuple(rank for kind in kinds for rank in kind.placement)
    timed = time_step(kinds, Schedule("1f1b", placement, tuple(map(tuple, orders)), len(kinds)))
    return Step(timed.makespan + _apart_once(task, one), busy)


def cornstarch_sizes(task: Task) -> Iterator[Sizes]:
    """Encoder stages of as many devices as the language model's."""

    def allowed(one: Sizes) -> bool:
        return one.encoders % (one.data * one.tensor) == 0

    return apart_sizes(task, allowed)


def encoder_pipeline(task: Task, one: Sizes, images: Sequence[int]) -> Step | None:
    """A step under Cornstarch's rule."""
    count = _micro_batches(images, one)
    if not count or not _fits(task, one, count):
        return None
    costs = task.costs
    depth = one.encoders // (one.data * one.tensor)
    text = _stages(task, one)
    longest = busy = 0.0
    for replica in range(one.data):
        kinds = []
        for m in range(count):
            first = (replica * count + m) * one.rows
            shown = sum(images[first : first + one.rows])
            encoder = [costs.seconds_of_images(math.ceil(shown / one.tensor))] * depth
            stages = [tuple(seconds / depth for seconds in times) for times in encoder] + text
            transfers = [0.0] * (len(stages) - 1)
            transfers[depth - 1] = _crossing(task, shown, one.tensor)
            kinds.append(MicroBatchKind.chain(_costs(stages, transfers), range(len(stages))))
            busy += one.tensor * sum(map(sum, stages))
        timed = time_step(kinds, _one_f_one_b(depth + one.pipeline, count))
        longest = max(longest, timed.makespan)
    return Step(longest + _apart_once(task, one), busy)


def submodels(task: Task, one: Sizes, images: Sequence[int]) -> Step | None:
    """A step of `hp.submodels`."""
    count = _micro_batches(images, one)
    if not count or not _fits(task, one, count):
        return None
    kinds = submodel_kinds(task, one, images)
    found = step_schedule(kinds, one.pipeline + 1)
    busy = sum(
        kind.count * kind.work(stage) * (one.encoders if rank == 0 else one.data * one.tensor)
        for kind in kinds
        for stage, rank in enumerate(kind.placement)
    )
    return Step(found.makespan + _apart_once(task, one), busy)


def submodel_kinds(task: Task, one: Sizes, images: Sequence[int]) -> list[MicroBatchKind]:
    """The micro-batches of a step of `hp.submodels`: the encoder is rank 0."""
    text = _stages(task, one)
    size = one.rows * one.data
    ordered = sorted(images, reverse=True)
    shown = Counter(
        math.ceil(sum(ordered[first : first + size]) / one.encoders) for first in range(0, len(ordered), size)
    )
    kinds = []
    for most, count in sorted(shown.items(), reverse=True):
        ranks = range(1, one.pipeline + 1)
        if not most:
            kinds.append(MicroBatchKind.chain(_costs(text, saved=_saved(task, one)), ranks, count))
            continue
        encoder = task.costs.seconds_of_images(most)
        transfers = (_crossing(task, most * one.encoders, one.encoders), *[0.0] * (one.pipeline - 1))
        saved = [_saved_images(task, most), *_saved(task, one)]
        kinds.append(MicroBatchKind.chain(_costs([encoder, *text], transfers, saved), (0, *ranks), count))
    return kinds


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _micro_batches(images: Sequence[int], one: Sizes) -> int:
    """Of a replica; 0 where rows do not divide."""
    size = one.data * one.rows
    return 0 if len(images) % size else len(images) // size


def _costs(stages: Sequence[Times], transfers: Sequence[float] = (), saved: Sequence[float] = ()) -> Costs:
    forward, before, after = zip(*stages, strict=True)
    both = tuple(a + b for a, b in zip(before, after, strict=True))
    times = {"forward": forward, "backward": both, "input": before, "weight": after}
    return Costs(**times, transfers=tuple(transfers), saved=tuple(saved))


def _saved(task: Task, one: Sizes) -> list[float]:
    """Bytes of the inputs of a stage's layers, for a micro-batch of a data rank."""
    shape = task.costs.shape
    layers = shape.text["num_hidden_layers"] / one.pipeline
    return [2.0 * one.rows * shape.length * shape.text["hidden_size"] * layers] * one.pipeline


def _saved_images(task: Task, images: float) -> float:
    """Bytes of the inputs of the encoder's layers, and of the features."""
    shape = task.costs.shape
    return 2.0 * images * shape.patches * shape.vision["hidden_size"] * shape.vision["num_hidden_layers"]


def _added(one: Times, other: Times) -> Times:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def _encoder(task: Task, shown: int, tensor: int) -> Times:
    """Of images that are dealt to the tensor ranks of a stage, which gather the features."""
    times = task.costs.seconds_of_images(math.ceil(shown / tensor))
    if tensor == 1 or not shown:
        return times
    gathered = task.cluster.collective_seconds("all_gather", _features(task, shown), range(tensor))
    return times[0] + gathered, times[1] + gathered, times[2]


def _features(task: Task, shown: int) -> float:
    """Bytes of the features of images, in bf16."""
    return 2.0 * shown * task.costs.shape.patches * task.costs.shape.text["hidden_size"]


def _crossing(task: Task, shown: int, senders: int) -> float:
    """Seconds in which each encoder rank sends its part of the features to another node."""
    if not shown:
        return 0.0
    return task.cluster.collective_seconds("send", _features(task, shown) / senders, (0, task.devices - 1))


def _stages(task: Task, one: Sizes, encoder: float = 0.0) -> list[Times]:
    """The stages of the language model, whose layers are dealt so that all take as long as far as they go: the first
    one has the encoder besides, `encoder` seconds on the mean, and the last one the head."""
    layers = [line(one.rows) for line in task.costs.layers[one.tensor]]
    head = [line(one.rows) for line in task.costs.head[one.tensor]]
    besides = [0.0] * one.pipeline
    besides[0] += encoder
    besides[-1] += sum(head)
    # Water is filled in from the lowest stage up.
    level, left = 0.0, sum(layers)
    heights = sorted(besides)
    for count, height in enumerate(heights, 1):
        above = heights[count] if count < len(heights) else math.inf
        if left <= (above - height) * count:
            level = height + left / count
            break
        left -= (above - height) * count
    shares = [max(0.0, level - height) / sum(layers) for height in besides]
    return [
        tuple(
            a * share + (b if stage == one.pipeline - 1 else 0.0) for a, b in zip(layers, head, strict=True)
        )  # type: ignore[misc]
        for stage, share in enumerate(shares)
    ]


def _one_f_one_b(ranks: int, count: int) -> Schedule:
    """1F1B of micro-batches that are each of a kind."""
    plain = named_schedule("1f1b", ranks, count, 1)
    orders = tuple(
        tuple(Action(one.kind, one.micro_batch * ranks + one.stage, one.micro_batch) for one in order)
        for order in plain.orders
    )
    return Schedule("1f1b", tuple(range(ranks)) * count, orders, count)


def _fits(task: Task, one: Sizes, count: int, encoder_among: int | None = None) -> bool:
    """Whether weights and gradients in bf16, a part of Adam's state in fp32, and the inputs of layers in flight fit.
    `encoder_among`: tensor ranks that hold a part of the encoder each, where it is beside the language model."""
    costs, shape = task.costs, task.costs.shape
    device = task.cluster.device
    assert device is not None

    def states(parameters: float, copies: int) -> float:
        return parameters * (4 + 12 / copies)

    text = costs.text_parameters / (one.tensor * one.pipeline)
    layers = shape.text["num_hidden_layers"] / one.pipeline
    in_flight = min(count, one.pipeline + (1 if one.encoders else 0))
    inputs = 2.0 * in_flight * one.rows * shape.length * shape.text["hidden_size"] * layers
    need = (
        states(text + (costs.vision_parameters / encoder_among if encoder_among else 0), one.data)
        + inputs
        + WORKSPACE
    )
    if one.encoders:
        mean = max(map(max, task.steps)) * one.rows * one.data / one.encoders
        kept = (
            2.0
            * in_flight
            * mean
            * shape.patches
            * shape.vision["hidden_size"]
            * shape.vision["num_hidden_layers"]
        )
        need = max(need, states(costs.vision_parameters, one.encoders) + kept + WORKSPACE)
    return need <= USABLE * device.memory.bytes / device.memory.ranks


def _once(cluster: Cluster, parameters: float, copies: int, apart: int) -> float:
    """Seconds of the sum of gradients, of the optimizer, and of gathering weights; ranks lie `apart` from another."""
    device = cluster.device
    assert device is not None
    ranks = range(0, copies * apart, apart)
    moved = sum(
        cluster.collective_seconds(kind, 2 * parameters, ranks) for kind in ("reduce_scatter", "all_gather")
    )
    return (moved if copies > 1 else 0.0) + 28 * parameters / copies / device.memory.read


def _apart_once(task: Task, one: Sizes) -> float:
    costs = task.costs
    text = _once(task.cluster, costs.text_parameters / (one.tensor * one.pipeline), one.data, one.tensor)
    return max(text, _once(task.cluster, costs.vision_parameters, one.encoders, 1))
