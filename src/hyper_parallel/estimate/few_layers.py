"""A step of many layers, predicted from steps of few.

*Order.* Collectives are ordered as for all layers: the search runs on few (as `overlap.order_search` has it), and the
best order that it finds is arranged for the repeated jobs of all (`estimate.repeat_jobs`), within what a device has.
Its peak is that of all layers.

*Time.* That order is made of steps of few layers, and what a layer adds is taken for all:

    step(l, r) = step(b, all) + (l − b) · (step(b + p, all) − step(b, all)) / p
                 + (l − r) · (step(b, none) − step(b, all)) / b

with l layers, of which r are computed again; where fewer than half are, `none` and `all` change places. Of many
micro-batches a few are simulated, and what one more adds is taken for the others.

What is captured and simulated does not grow with the model or the batch. Whether layers are alike is told by their
modules and graphs (`step.capture_micro_batch`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from torch import nn

from hyper_parallel.cluster import Cluster
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.config import RunConfig
from hyper_parallel.estimate.build_trace import of_micro_batch
from hyper_parallel.estimate.predict import collective_algorithm, prices_views
from hyper_parallel.estimate.prediction import count_micro_batches, model_of
from hyper_parallel.estimate.repeat_jobs import CAPTURED, LayerRun, jobs_of_all
from hyper_parallel.estimate.repeat_ops import Unlike
from hyper_parallel.graph import StepGraph, balanced_sizes, rewritten
from hyper_parallel.graph.accumulate import Accumulation
from hyper_parallel.graph.capture_overrides import uncollected
from hyper_parallel.graph.costs import costs
from hyper_parallel.graph.liveness import lifetimes, peak_of
from hyper_parallel.graph.lower import lowered
from hyper_parallel.graph.step_context import current_step, region_of
from hyper_parallel.offloading.pass_pipeline import passes
from hyper_parallel.overlap.collective_order import order_pass
from hyper_parallel.overlap.jobs import Prices
from hyper_parallel.overlap.list_scheduling import replayed
from hyper_parallel.overlap.order_search import OrderSearch, Overlap, Room, Tried
from hyper_parallel.shard.layer_kinds import layers_in
from hyper_parallel.shard.plan import make_plan
from hyper_parallel.simulator import simulate
from hyper_parallel.step.accumulation import loop_of, loop_width, repeated
from hyper_parallel.step.capture_micro_batch import SHORT
from hyper_parallel.step.capture_micro_batch import FewLayers as Graphs
from hyper_parallel.step.capture_train_step import capture_few
from hyper_parallel.strategy import recomputed_layers
from hyper_parallel.trace import Collective, Timeline, Trace
from hyper_parallel.trace.timeline import step_parts
from hyper_parallel.workload import flops_of_model
from hyper_parallel.workload.work import mfu

MORE = 4
"""Layers that the longer step for times has more than the shorter one."""
MANY = 16
"""Layers above which a step is predicted from few."""
RUNS = 3, 4
"""Of the body of the loop over micro-batches: how often it runs in the two steps that are simulated."""
AS_WRITTEN = Tried(buckets=False, together=1, window=0.0, seconds=0.0, bytes=0)
"""The order of the model's code, as `OrderSearch.jobs` is asked for it."""
_PAYS = 0.999
"""Of the time of a step as it is written, what an order must leave at most."""


@dataclass(frozen=True)
class FewLayers:
    """The predicted step of all layers."""

    seconds: float | None
    """None where the step was not ordered: it holds more than `limit` in the order of the model's code, or its busiest
    queue alone takes as long as another step."""
    peak: float
    """Bytes of the fullest rank."""
    fits: bool
    least: float
    """Seconds of its busiest queue: its kernels, or the collectives over an axis, each alone on its links."""
    parts: Mapping[str, float]
    """As of `Prediction.parts`."""
    mfu: float | None


def predict_few_layers(
    run: RunConfig,
    cluster: Cluster,
    limit: float | None,
    progress: Callable[[str], None],
    quickest: float = inf,
) -> FewLayers | None:
    """The prediction of a run from steps of few of its layers; None where its step is to be predicted whole: it has few
    layers, a pipeline, a budget, or a config whose layers are not of one kind.

    `limit`: bytes; `quickest`: seconds; a step is not ordered that holds more, or of which a queue takes as long.
    Errors are those of `predict_run`.
    """
    strategy, memory = run.effective_strategy, run.effective_strategy.memory
    model = model_of(run, [])
    layers = layers_in(model, make_plan(model, strategy))
    if layers is None or len(layers) <= MANY or memory.device is not None:
        return None
    if strategy.axes.pipeline > 1 or isinstance(memory.recompute_layers, list):
        return None
    with replace(current_step(), pads_values=not prices_views(cluster)).installed():
        return _predicted(run, model, cluster, limit, progress, quickest)


@uncollected()
def _predicted(
    run: RunConfig,
    model: nn.Module,
    cluster: Cluster,
    limit: float | None,
    progress: Callable[[str], None],
    quickest: float,
) -> FewLayers | None:
    assert cluster.device is not None
    strategy, micro_batches = run.effective_strategy, count_micro_batches(run)
    progress("capturing a few layers")
    with fake_ranks(strategy.axes.world, 0):
        graphs = of_micro_batch(model, run, strategy, partial(capture_few, micro_batches=micro_batches))
    if graphs is None:
        return None
    total, front = graphs.total, graphs.first - 1
    again = len(recomputed_layers(strategy.memory, [total]))
    mixed = 0 < again < total
    captured = partial(_FewLayerStep.of, run, cluster, graphs)
    ends = sorted({front, again, total} - {0})
    # `overlap.order_search` has a short step of so many layers: the first ones of all, and the last.
    short = graphs.least + SHORT
    most_captured = CAPTURED if mixed else short - front
    runs = [LayerRun.of(end - begin, most_captured) for begin, end in zip([0, *ends], ends, strict=False)]
    few = sum(one.captured for one in runs)
    few_again = sum(one.captured for one, end in zip(runs, ends, strict=True) if end <= again)
    most = 2 * again >= total
    whole = captured(few, few_again)
    # The steps for times, and how often each counts.
    base = graphs.least + 2 if mixed else few
    longer = (total - base) / MORE
    steps = [captured(base, base * most) if mixed else whole, captured(base + MORE, (base + MORE) * most)]
    counts = [1 - longer, longer]
    if mixed:
        others = (total - again if most else again) / base
        steps.append(captured(base, base * (not most)))
        counts = [1 - longer - others, longer, others]

    def summed(values: Sequence[float]) -> float:
        return sum(count * one for count, one in zip(counts, values, strict=True))

    written, resident = summed([step.written for step in steps]), summed([step.resident for step in steps])
    queues = {name for step in steps for name in step.queues}
    least = max(summed([step.queues.get(name, 0.0) for step in steps]) for name in queues)
    order = order_pass(strategy, cluster, "cpu")
    search = whole.search(order) if isinstance(order, Overlap) else None
    if mixed and search is not None:
        written = _written(search, resident, runs) or written
    capacity = cluster.device.memory.bytes / cluster.device.memory.ranks
    if least >= quickest or (limit is not None and written > limit):
        return FewLayers(None, written, written <= (limit or capacity), least, {}, None)
    progress("ordering and simulating them")
    held: float | None = None
    tried: Tried | None = None
    if isinstance(order, Overlap) and search is not None:
        everything = _Rest(max(capacity, written), written, resident)
        trial = captured(short, sum(layer < again for layer in graphs.layers(short))) if mixed else whole
        trials = trial.search(order) if mixed else search
        trials.room = everything.room(trial)
        tried, held = _chosen(trials, search, everything, runs)
    timed = []
    for step in steps:
        body = step.body
        if isinstance(order, Overlap):
            body = body if tried is None else step.search(order).reordered(tried)
        elif order is not None:
            body = order(body)
        timed.append(step.timed(body))
    seconds = summed([one.seconds for one in timed])
    parts = {
        name: max(summed([one.parts.get(name, 0.0) for one in timed]), 0.0)
        for name in sorted({name for one in timed for name in one.parts})
    }
    if held is None:
        held = max(summed([one.peak for one in timed]), written)
    else:
        held += summed([one.beyond for one in timed])
    flops = flops_of_model(model).per_token(run.data.sequence)
    share = None
    if timed[0].peak_flops is not None:
        tokens = run.train.batch * run.data.sequence
        share = mfu(flops * tokens, seconds, strategy.axes.world, timed[0].peak_flops)
    return FewLayers(seconds, held, held <= capacity, least, parts, share)


@dataclass(frozen=True)
class _Rest:
    """The memory of all layers: bytes of a device, that the step holds as it is written, and that are always there."""

    capacity: float
    written: float
    resident: float

    def room(self, step: _FewLayerStep) -> Room:
        """What is left to a step of few layers, where each micro-batch beside others holds as much again."""
        stays = self.resident - step.resident
        moves = self.written - step.written - stays
        return lambda together: self.capacity - stays - moves * together


@dataclass(frozen=True)
class _Timed:
    """A step of few layers, ordered and simulated."""

    seconds: float
    parts: Mapping[str, float]
    peak: float
    """Bytes that it holds at most."""
    beyond: float
    """Of these, what the body of its loop alone does not hold, where that runs once: sums of gradients."""
    peak_flops: float | None


@dataclass(frozen=True)
class _FewLayerStep:
    """A captured step of few layers, in the order of the model's code."""

    run: RunConfig
    cluster: Cluster
    step: StepGraph | Accumulation
    """With its only micro-batch, or the loop over them."""
    micro_batches: int
    queues: Mapping[str, float]
    """Seconds of its kernels, and of its collectives over each axis."""
    written: float
    """Bytes that it holds at most."""
    resident: float
    """Bytes that are there from the start."""

    @classmethod
    def of(cls, run: RunConfig, cluster: Cluster, graphs: Graphs, layers: int, again: int) -> _FewLayerStep:
        """The step with so many layers, of which so many are computed again."""
        strategy, micro_batches = run.effective_strategy, count_micro_batches(run)
        modules = [f"{graphs.prefix}.{layer}" for layer in graphs.layers(layers)[:again]]
        one = rewritten(graphs.graph(layers), passes(strategy, cluster, ordered=False, recompute=modules))
        queues = _queue_seconds(one, cluster, micro_batches)
        step: StepGraph | Accumulation = one
        if micro_batches > 1:
            order = order_pass(strategy, cluster, "cpu")
            width = loop_width(() if order is None else (order,), micro_batches)
            step = loop_of(one, strategy.memory.shard, width)
        body = step.body if isinstance(step, Accumulation) else step
        lives = lifetimes(body, balanced_sizes(body))
        resident = sum(life.bytes for life in lives if life.born < 0)
        return cls(run, cluster, step, micro_batches, queues, peak_of(lives).bytes, resident)

    @property
    def body(self) -> StepGraph:
        """Of the loop over micro-batches."""
        return self.step.body if isinstance(self.step, Accumulation) else self.step

    def search(self, order: Overlap) -> OrderSearch:
        """The orders of the body."""
        return OrderSearch(self.body, self.cluster, balanced_sizes(self.body), order.pieces)

    def timed(self, body: StepGraph) -> _Timed:
        """The step with its body in another order, simulated."""
        once = 0.0
        if isinstance(self.step, StepGraph):
            counts, timelines = [1.0], [self._timeline(body)]
        else:
            loop = self.step.with_body(body)
            runs, few, more = self.micro_batches // loop.width, *RUNS
            counts, numbers = [(more - runs) / (more - few), (runs - few) / (more - few)], [*RUNS]
            if runs <= more:
                counts, numbers = [1.0], [runs]
            if runs == 1:
                once = peak_of(lifetimes(loop.body, balanced_sizes(loop.body))).bytes
            timelines = [self._timeline(repeated(loop, number * loop.width)) for number in numbers]
        parts: defaultdict[str, float] = defaultdict(float)
        for count, timeline in zip(counts, timelines, strict=True):
            for name, seconds in step_parts(timeline).items():
                parts[name] += count * seconds
        seconds = sum(count * one.step for count, one in zip(counts, timelines, strict=True))
        held = max(one.peak.bytes for one in timelines)
        return _Timed(seconds, parts, held, held - once if once else 0.0, timelines[0].peak_flops)

    def _timeline(self, step: StepGraph) -> Timeline:
        strategy = self.run.effective_strategy
        one = lowered(step, views=prices_views(self.cluster), fused=self.run.train.compile is True)
        classes = dict.fromkeys(range(strategy.axes.world), "all")
        trace = Trace({"all": one.ops}, classes, {"all": one.resident}, 0.0)
        return simulate(trace, self.cluster, algorithm=collective_algorithm(strategy))


def _written(whole: OrderSearch, resident: float, runs: Sequence[LayerRun]) -> float | None:
    """Bytes that all layers hold at most in the order of the model's code; None where their jobs are not known."""
    try:
        return replayed(jobs_of_all(whole.jobs(AS_WRITTEN), runs).jobs).bytes + resident
    except Unlike:
        return None


def _chosen(
    few: OrderSearch, whole: OrderSearch, everything: _Rest, runs: Sequence[LayerRun]
) -> tuple[Tried | None, float | None]:
    """The order that a search on few layers chooses for all, and the bytes that all hold in it; None for the order of
    the model's code, and for bytes that are not known. `whole`: of the captured layers of all `runs`."""
    before = few.as_it_is().step
    for one in few.best():
        if one.timeline.step >= _PAYS * before:
            break
        if one.tried.usual:
            return one.tried, None
        try:
            jobs = jobs_of_all(whole.jobs(one.tried), runs)
        except Unlike:
            return one.tried, None
        held = whole.held(one.tried, jobs, everything.capacity, everything.resident)
        if held is not None:
            return one.tried, held
    return None, None


def _queue_seconds(step: StepGraph, cluster: Cluster, micro_batches: int) -> dict[str, float]:
    """Seconds of each queue of a step with one of its micro-batches, in which nothing waits for another queue."""
    prices = Prices(cluster)
    seconds: defaultdict[str, float] = defaultdict(float)
    for node, cost in costs(step, balanced_sizes(step)).items():
        queue = f"over {cost.axis}" if isinstance(cost, Collective) else "kernels"
        times = micro_batches if region_of(node).micro_batch is not None else 1
        seconds[queue] += prices.seconds(cost) * times
    return seconds
