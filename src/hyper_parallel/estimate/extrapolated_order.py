"""Order of a step's collectives, extrapolated from steps with few layers.

Ordering a whole step takes minutes for a model of tens of layers. What the order hides of a layer's communication is
hidden within a layer or two of it, and micro-batches are ordered alone or in pairs; so past the ends
the time of l repeated layers and m micro-batches is

    T(l, m) = a + b · l + c · m + d · l · m

which four small ordered steps settle: of `LAYERS` repeats and of `MICRO` micro-batches (of all, where there are not
more). The small step is given the room beside what it holds that the whole one has: memory of the device less the
difference of their peaks in the order of the model's code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from hyper_parallel.cluster import Cluster
from hyper_parallel.config import RunConfig
from hyper_parallel.estimate.build_trace import CAPTURED, captured_step
from hyper_parallel.estimate.predict import predict_run
from hyper_parallel.estimate.run_inputs import count_micro_batches, model_of
from hyper_parallel.graph.alike_layers import Period, find_period
from hyper_parallel.graph.dynamic_sizes import balanced_sizes
from hyper_parallel.offloading.pass_pipeline import passes
from hyper_parallel.overlap import Overlap
from hyper_parallel.overlap.collective_order import order_pass
from hyper_parallel.overlap.overlap_pass import simulated
from hyper_parallel.shard.layer_kinds import layer_kinds, with_layers
from hyper_parallel.shard.plan import make_plan

LAYERS = (3, 4)
"""Repeats of the period of layers in the two small models."""
MICRO = (2, 4)
"""Micro-batches of their steps; one more where their number is odd, since those of an even one go side by side."""


@dataclass(frozen=True)
class PredictedStep:
    """A step as training would run it."""

    seconds: float
    peak: float
    """Bytes."""
    fits: bool | None
    """Whether the peak is within a device's memory; None where that is not known."""
    how: str
    """What was ordered, in words."""


def predicted_step(
    config: RunConfig, cluster: Cluster, *, progress: Callable[[str], None] | None = None
) -> PredictedStep:
    """What a step of a run would take on a cluster with its collectives ordered. Errors are those of `predict_run`.

    The whole step is ordered where that is no more work than the small ones, and under a budget, whose moves depend on
    every layer, the order is that of the model's code.
    """
    say = progress or (lambda _: None)
    strategy = config.effective_strategy
    plain = model_of(config, [])
    if strategy.axes.pipeline > 1:
        stages = predict_run(config, cluster, model=plain, progress=progress)
        how = "its stages' collectives in the order of the model's code"
        return PredictedStep(stages.timeline.step, stages.timeline.peak.bytes, stages.fits, how)
    budgeted = strategy.memory.device is not None
    schedule = None if budgeted else order_pass(strategy, cluster, "cpu")
    small = _small(plain, config) if isinstance(schedule, Overlap) else None
    if not isinstance(schedule, Overlap) or small is None:
        whole = predict_run(config, cluster, model=plain, ordered=schedule is not None, progress=progress)
        how = "no collective is hidden in it" if budgeted else "every layer ordered"
        return PredictedStep(whole.timeline.step, whole.timeline.peak.bytes, whole.fits, how)
    unordered = predict_run(config, cluster, model=plain, progress=progress)
    peak, device = unordered.timeline.peak.bytes, cluster.device
    assert device is not None, "a cluster that predicts has a device"
    capacity = device.memory.bytes / device.memory.ranks
    micro_batches = count_micro_batches(config)
    odd = micro_batches % 2
    micros = tuple(micro + odd for micro in MICRO) if micro_batches > MICRO[1] + odd else (micro_batches,)
    found: dict[tuple[int, int], float] = {}
    more = 0.0
    for repeats in LAYERS:
        kept = replace(small, captured=repeats).layers
        model, smaller = with_layers(plain, make_plan(plain, strategy), strategy, kept)
        for micro in micros:
            say(f"ordering the collectives of {len(kept)} of {small.total} layers, {micro} micro-batches")
            unordered_passes = passes(smaller, cluster, ordered=False)
            step = captured_step(model, config, smaller, micro, unordered_passes)
            before = simulated(step, cluster, balanced_sizes(step))
            order = replace(schedule, memory=capacity - (peak - before.peak.bytes))
            step = captured_step(model, config, smaller, micro, [*unordered_passes, order])
            after = simulated(step, cluster, balanced_sizes(step))
            found[repeats, micro] = after.step
            more = max(more, after.peak.bytes - before.peak.bytes)
    seconds = _through(
        {repeats: _through({m: found[repeats, m] for m in micros}, micro_batches) for repeats in LAYERS},
        small.repeats,
    )
    return PredictedStep(
        min(seconds, unordered.timeline.step),
        peak + more,
        None if unordered.capacity is None else peak + more <= unordered.capacity,
        f"ordered as training would, from {LAYERS[0]} and {LAYERS[1]} of {small.repeats} repeated layers",
    )


def _small(model: nn.Module, config: RunConfig) -> Period | None:
    """The layers that stand for all; None where the small steps are as much work as the whole."""
    strategy = config.effective_strategy
    kept = find_period(layer_kinds(model, make_plan(model, strategy), strategy), CAPTURED)
    micro_batches = count_micro_batches(config)
    micros = sum(MICRO) if micro_batches > MICRO[1] else micro_batches
    less = kept is not None and sum(LAYERS) * micros < kept.repeats * micro_batches
    return kept if less else None


def _through(points: dict[int, float], at: int) -> float:
    """The line through one or two points, at a place."""
    (first, low), (last, high) = min(points.items()), max(points.items())
    return low if first == last else low + (high - low) * (at - first) / (last - first)
