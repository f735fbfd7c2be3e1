"""A step of many layers, predicted from steps of few: what a layer adds is taken for all.

    step(l, r) = step(b, all) + (l − b) · (step(b + p, all) − step(b, all)) / p
                 + (l − r) · (step(b, none) − step(b, all)) / b

with l layers, of which r are computed again; where fewer than half are, `none` and `all` change places. It holds for
seconds, their parts, and bytes as the code is written. Of many micro-batches a few are simulated, and what one more
adds is taken for the others. The order of collectives is searched for one of these steps, and made of the others; each
is ordered within as much memory beyond its own bytes as all layers leave free. What is captured, ordered and simulated
does not grow with the model or the batch; layers that a Transformers config describes by their number alone are alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from hyper_parallel import config as files
from hyper_parallel.cluster import Cluster
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.config import RunConfig
from hyper_parallel.estimate.build_trace import captured_micro_batch
from hyper_parallel.estimate.predict import collective_algorithm, prices_views
from hyper_parallel.estimate.prediction import count_micro_batches, model_of
from hyper_parallel.graph import Pass, StepGraph, balanced_sizes, rewritten
from hyper_parallel.graph.capture_overrides import uncollected
from hyper_parallel.graph.costs import costs
from hyper_parallel.graph.liveness import lifetimes, peak_of
from hyper_parallel.graph.lower import lowered
from hyper_parallel.graph.step_context import current_step, region_of
from hyper_parallel.offloading.pass_pipeline import passes
from hyper_parallel.overlap.collective_order import order_pass
from hyper_parallel.overlap.order_search import Overlap, Room, Tried
from hyper_parallel.simulator import simulate
from hyper_parallel.step.accumulation import loop_width, repeated, rewritten_loop
from hyper_parallel.trace import Timeline, Trace
from hyper_parallel.trace.timeline import step_parts
from hyper_parallel.workload import flops_of_model
from hyper_parallel.workload.work import Work, mfu

LAYERS = "num_hidden_layers"
FIRST, MORE = 4, 4
"""Layers of the shorter step beside those that are not like the others, and how many more the longer one has."""
MANY = 16
"""Layers above which a step is predicted from few."""
RUNS = 3, 4
"""Of the body of the loop over micro-batches: how often it runs in the two steps that are simulated."""


@dataclass(frozen=True)
class FewLayers:
    """The predicted step of all layers."""

    seconds: float | None
    """None where the step was not ordered: it holds more than `limit` in the order of the model's code, or its kernels
    alone take `least`, as long as another step."""
    peak: float
    """Bytes of the fullest rank."""
    fits: bool
    least: float
    """Seconds of its kernels."""
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

    `limit`: bytes; `quickest`: seconds; a step is not ordered that holds more, or whose kernels take as long. Errors
    are those of `predict_run`.
    """
    strategy, memory = run.effective_strategy, run.effective_strategy.memory
    given = dict(run.model.config or {})
    total = given.get(LAYERS)
    if not isinstance(total, int) or total <= MANY or memory.device is not None:
        return None
    if strategy.axes.pipeline > 1 or _listed(given, total) or isinstance(memory.recompute_layers, list):
        return None
    with replace(current_step(), pads_values=not prices_views(cluster)).installed():
        return _predicted(run, cluster, total, limit, progress, quickest)


@uncollected()
def _predicted(
    run: RunConfig,
    cluster: Cluster,
    total: int,
    limit: float | None,
    progress: Callable[[str], None],
    quickest: float,
) -> FewLayers:
    assert cluster.device is not None
    strategy = run.effective_strategy
    short = int(dict(run.model.config or {}).get("first_k_dense_replace") or 0) + FIRST
    again = strategy.memory.recompute_layers
    most = again is None or 2 * again >= total
    kinds = [(short, most), (short + MORE, most)]
    longer = (total - short) / MORE
    # Of each step, how often it counts.
    counts = [1 - longer, longer]
    if isinstance(again, int):
        others = (total - again if most else again) / short
        kinds.append((short, not most))
        counts = [1 - longer - others, longer, others]

    def summed(values: Sequence[float]) -> float:
        return sum(count * one for count, one in zip(counts, values, strict=True))

    progress(f"capturing {short} and {short + MORE} of {total} layers")
    steps = [_FewLayerStep.of(_with_layers(run, layers, again), cluster) for layers, again in kinds]
    written, resident = summed([step.written for step in steps]), summed([step.resident for step in steps])
    least = summed([step.kernels for step in steps])
    capacity = cluster.device.memory.bytes / cluster.device.memory.ranks
    if least >= quickest or (limit is not None and written > limit):
        return FewLayers(None, written, written <= (limit or capacity), least, {}, None)
    progress("ordering and simulating them")
    tried: Tried | None = None
    timed = []
    for step in steps:
        room = partial(_room, max(capacity, written), resident - step.resident, written - step.written)
        found = step.timed(room, tried)
        tried = tried or found.tried
        timed.append(found)

    seconds = summed([one.seconds for one in timed])
    parts = {
        name: max(summed([one.parts[name] for one in timed]), 0.0)
        for name in sorted({name for one in timed for name in one.parts})
    }
    held = min(max(summed([one.peak for one in timed]), written), max(capacity, written))
    flops = flops_of_model(model_of(run, [])).per_token(run.data.sequence)
    share = None
    if timed[0].peak_flops is not None:
        tokens = run.train.batch * run.data.sequence
        share = mfu(flops * tokens, seconds, strategy.axes.world, timed[0].peak_flops)
    return FewLayers(seconds, held, held <= capacity, least, parts, share)


def _room(room: float, resident: float, written: float, together: int) -> float:
    """Bytes for a step of few layers, where the others have so many more that stay, and in all; each micro-batch that
    runs beside others holds as much again."""
    return room - resident - (written - resident) * together


@dataclass(frozen=True)
class _Timed:
    """A step of few layers, ordered and simulated."""

    seconds: float
    parts: Mapping[str, float]
    peak: float
    peak_flops: float | None
    tried: Tried | None
    """How its collectives were ordered, where that was searched for."""


@dataclass(frozen=True)
class _FewLayerStep:
    """A captured step of few layers."""

    run: RunConfig
    cluster: Cluster
    one: StepGraph
    """With one of its micro-batches, in the order of the model's code."""
    micro_batches: int
    written: float
    """Bytes that it holds at most as the code is written."""
    resident: float
    """Bytes that are there from the start."""

    @classmethod
    def of(cls, run: RunConfig, cluster: Cluster) -> _FewLayerStep:
        """The step of a run; errors as of `predict_run`."""
        strategy, micro_batches = run.effective_strategy, count_micro_batches(run)
        with fake_ranks(strategy.axes.world, 0):
            one = captured_micro_batch(model_of(run, []), run, strategy, micro_batches)
            one = rewritten(one, passes(strategy, cluster, ordered=False))
        bare = cls(run, cluster, one, micro_batches, 0.0, 0.0)
        (step,) = bare._steps((), (min(micro_batches, 2),))
        lives = lifetimes(step, balanced_sizes(step))
        resident = sum(life.bytes for life in lives if life.born < 0)
        return replace(bare, written=peak_of(lives).bytes, resident=resident)

    @property
    def kernels(self) -> float:
        """Seconds of its kernels."""
        device = self.cluster.device
        assert device is not None
        seconds = 0.0
        for node, cost in costs(self.one, balanced_sizes(self.one)).items():
            if isinstance(cost, Work) and cost.kind != "view":
                each = region_of(node).micro_batch is not None
                seconds += device.seconds(cost) * (self.micro_batches if each else 1)
        return seconds

    def timed(self, room: Room, tried: Tried | None) -> _Timed:
        """The step with its collectives in order, within `room` bytes; in the order `tried` where that fits."""
        order = order_pass(self.run.effective_strategy, self.cluster, "cpu")
        if isinstance(order, Overlap):
            order = replace(order, memory=room, tried=tried, found=[])
        rewrites = () if order is None else (order,)
        width = loop_width(rewrites, self.micro_batches)
        runs, few, more = self.micro_batches // width, *RUNS
        counts = {few: (more - runs) / (more - few), more: (runs - few) / (more - few)}
        if runs <= more:
            counts = {runs: 1.0}
        timelines = [self._timeline(step) for step in self._steps(rewrites, [n * width for n in counts])]
        parts: defaultdict[str, float] = defaultdict(float)
        for count, timeline in zip(counts.values(), timelines, strict=True):
            for name, seconds in step_parts(timeline).items():
                parts[name] += count * seconds
        return _Timed(
            sum(count * one.step for count, one in zip(counts.values(), timelines, strict=True)),
            parts,
            max(one.peak.bytes for one in timelines),
            timelines[0].peak_flops,
            order.found[-1].chosen if isinstance(order, Overlap) else None,
        )

    def _steps(self, rewrites: Sequence[Pass], counts: Sequence[int]) -> list[StepGraph]:
        """The step with these numbers of its micro-batches, after passes of one or two of them."""
        if self.micro_batches == 1:
            return [rewritten(self.one, rewrites)]
        level = self.run.effective_strategy.memory.shard
        # A copy, since the loop takes the place of the graph that it is made of.
        loop = rewritten_loop(self.one.copy(), level, self.micro_batches, rewrites)
        return [repeated(loop, count) for count in counts]

    def _timeline(self, step: StepGraph) -> Timeline:
        strategy = self.run.effective_strategy
        fused = self.run.train.compile is True
        one = lowered(step, views=prices_views(self.cluster), fused=fused)
        classes = dict.fromkeys(range(strategy.axes.world), "all")
        trace = Trace({"all": one.ops}, classes, {"all": one.resident}, 0.0)
        return simulate(trace, self.cluster, algorithm=collective_algorithm(strategy))


def _with_layers(run: RunConfig, layers: int, again: bool) -> RunConfig:
    """The run with so many layers, all or none of them computed again."""
    data = run.model_dump(mode="json", exclude_unset=True)
    data["model"]["config"][LAYERS] = layers
    memory = data["strategy"].setdefault("memory", {})
    memory.pop("recompute_layers", None)
    if not again:
        memory["recompute"] = "none"
    return files.from_dict(data, source="the planned file")


def _listed(given: Mapping[str, object], total: int) -> bool:
    """Whether a config says something of each layer."""
    return any(isinstance(value, list | tuple) and len(value) == total for value in given.values())
