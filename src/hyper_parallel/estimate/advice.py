"""The one change of a run file that shortens its simulated step most: branch and bound over single changes.

    bound = max(T_comp, max over axes T_comm(axis))                                                      `_bound`

A change is of one setting (recomputation, shards, micro-batch, compilation, a degree that moves to another axis) and is
written as the overrides that make it. Each is captured in the order of the model's code, which takes a second or two
and gives its bytes, its step, and the bound: ordering hides communication, at best all of it. Of those that fit, COUNT
are then simulated as training orders them, first those whose step is least if half of what can be hidden is, without
those whose bound is above the best step so far. The figures are those of `predict_run`, so that `simulate` with the
overrides says the same.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import ceil, inf
from pathlib import Path
from typing import Any

from hyper_parallel.cluster import Cluster
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.estimate.predict import predict_run
from hyper_parallel.estimate.prediction import Prediction
from hyper_parallel.graph.capture_overrides import collect_between
from hyper_parallel.step.build import transformers_config
from hyper_parallel.units import format_bytes, format_duration

Change = tuple[str, ...]
"""Overrides of a run file, such as ``("strategy.memory.recompute=none",)``."""

COUNT = 3
"""Changes that are simulated with their collectives ordered, at most."""
LEAST = 0.01
"""Share of the step that a change has to save."""
FILLED = 0.95
"""Of a device's memory: what a step with fewer recomputed layers may hold in the order of the model's code."""


@dataclass(frozen=True)
class _Captured:
    """A changed run whose step was captured in the order of the model's code."""

    run: RunConfig
    written: float
    """Seconds of the step."""
    bound: float
    """Seconds that it takes at least in any order of its collectives."""
    peak: int
    """Bytes."""


@dataclass(frozen=True)
class Advice:
    """The change that helps most."""

    change: Change | None
    """None where none of them does."""
    step: float
    """Predicted seconds with the change, or of the file where there is none."""
    peak: int
    """Predicted bytes of the fullest rank."""
    instead: float
    """Seconds of the file's own step."""
    fitted: bool
    """Whether the file's own step fits; if not, the change makes it fit."""
    captured: int
    """Changes that were captured."""
    simulated: int
    """Changes that were simulated with their collectives ordered."""

    def text(self) -> str:
        """One line, with the change as a shell takes it."""
        if self.change is None:
            most = "makes it fit" if not self.fitted else f"saves {LEAST:.0%} of the step and fits"
            return f"helps most: nothing; none of {self.captured} single changes of the file {most}"
        share = f"{self.step / self.instead - 1:+.0%}".replace("-", "−")
        gain = f"{format_duration(self.step)} instead of {format_duration(self.instead)} ({share})"
        fits = "" if self.fitted else "it fits, "
        return f"helps most: {shlex.join(self.change)}: {fits}{gain}, {format_bytes(self.peak)}"

    def to_json(self) -> dict[str, Any]:
        """Plain data; times are seconds, memory is bytes; all are predicted."""
        return {
            "change": None if self.change is None else list(self.change),
            "step": self.step,
            "peak": self.peak,
            "instead": self.instead,
            "captured": self.captured,
            "simulated": self.simulated,
        }


def advise(
    own: Prediction,
    run: RunConfig,
    changed: Callable[[Change], RunConfig],
    cluster: Cluster,
    *,
    cache: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Advice:
    """The change of a run that helps most: the shortest step that fits.

    `own`: the run's prediction. `changed`: the run with a change; raises HyperParallelError where it is not valid.
    `cache`: as of `predict_run`.
    """
    capacity = own.capacity or inf
    captured: dict[Change, _Captured] = {}

    def capture(proposed: Iterable[Change]) -> None:
        for change in proposed:
            try:
                other = changed(change)
                known = (run, *(one.run for one in captured.values()))
                if other in known or other.effective_strategy.axes.world != run.effective_strategy.axes.world:
                    continue
                say(f"capturing {shlex.join(change)}")
                found = predict_run(other, cluster, as_written=True, cache=cache)
            except HyperParallelError:
                continue
            captured[change] = _Captured(other, found.timeline.step, _bound(found), found.timeline.peak.bytes)
            del found
            collect_between()

    capture(changes(run, fits=own.fits is not False))
    nothing_again = captured.get(_kept(run))
    if nothing_again is not None:
        capture(_fewer_recomputed(run, own.timeline.peak.bytes, nothing_again.peak, capacity))
    best: Change | None = None
    step, peak = own.timeline.step, own.timeline.peak.bytes
    least = inf if own.fits is False else step * (1 - LEAST)
    simulated = 0
    for change, one in sorted(captured.items(), key=lambda item: item[1].bound + item[1].written):
        if one.peak > capacity or one.bound >= least:
            continue
        seconds, held = one.written, one.peak
        # A pipeline's stages stay in the order of the code, so that it was simulated already.
        if one.run.effective_strategy.axes.pipeline == 1:
            if simulated == COUNT:
                continue
            say(f"simulating {shlex.join(change)}")
            timeline = predict_run(one.run, cluster, cache=cache).timeline
            seconds, held = timeline.step, timeline.peak.bytes
            simulated += 1
            del timeline
            collect_between()
        if held <= capacity and seconds < least:
            best, least = change, seconds
            step, peak = seconds, held
    return Advice(best, step, peak, own.timeline.step, own.fits is not False, len(captured), simulated)


def _bound(found: Prediction) -> float:
    """Seconds that a step takes at least; of a pipeline, whose stages stay in the order of the code, its predicted
    step."""
    if found.pipeline is not None:
        return found.timeline.step
    calls = (one.communication for one in found.timeline.by_axis().values())
    return max(found.timeline.computing, *calls, 0.0)


def changes(run: RunConfig, *, fits: bool) -> Iterator[Change]:
    """Single changes of a run that may shorten its step; where it does not `fit`, those that may make it fit too. Some
    of them are not valid."""
    strategy, memory = run.effective_strategy, run.effective_strategy.memory
    axes = strategy.axes
    yield from ((f"train.micro_batch={run.micro_batch * times}",) for times in (2, 4, 8))
    if run.train.compile is not True:
        yield ("train.compile=true",)
    if memory.recompute in ("layer", "selective"):
        yield _kept(run)
    if memory.recompute == "layer":
        yield ("strategy.memory.recompute=selective",)
    if memory.shard == "parameters" and axes.shard * axes.context > 1:
        yield ("strategy.memory.reshard_after_forward=false",)
        again = ("strategy.memory.reshard_after_forward=null",) * (memory.reshard_after_forward is not None)
        yield from ((f"strategy.memory.shard={level}", *again) for level in ("gradients", "optimizer"))
    if memory.gathered != "keep":
        yield ("strategy.memory.gathered=keep",)
    if strategy.overlap.schedule != "auto":
        yield ("strategy.overlap.schedule=auto",)
    if axes.pipeline > 1 and strategy.pipeline.schedule != "auto":
        yield ("strategy.pipeline.schedule=auto",)
    if axes.tensor > 1 and not strategy.sequence:
        yield ("strategy.sequence=true",)
    for axis in ("tensor_x", "tensor_y", "context", "pipeline"):
        yield from _moved(run, axis, "shard")
    yield from _moved(run, "shard", "replicate")
    if fits:
        return
    if run.micro_batch > 1:
        yield (f"train.micro_batch={max(run.micro_batch // 2, 1)}",)
        yield ("train.micro_batch=1",)
    if memory.recompute != "layer" or memory.recompute_layers is not None:
        yield ("strategy.memory.recompute=layer", "strategy.memory.recompute_layers=null")
    if memory.shard != "parameters":
        yield ("strategy.memory.shard=parameters",)
    yield from _moved(run, "replicate", "shard")
    for axis in ("tensor_x", "context"):
        yield from _moved(run, "shard", axis)


def _kept(run: RunConfig) -> Change:
    """The change after which nothing is recomputed."""
    null = ("strategy.memory.recompute_layers=null",)
    return (
        "strategy.memory.recompute=none",
        *null * (run.effective_strategy.memory.recompute_layers is not None),
    )


def _moved(run: RunConfig, source: str, target: str) -> Iterator[Change]:
    """Degrees that move from one axis to another one.

    All axes are written: an override adds keys behind those of the file, on neighbouring ranks.
    """
    strategy, axes = run.effective_strategy, run.effective_strategy.axes
    degree = axes.degree(source)
    for factor in sorted({2, 4, 8} if source in ("shard", "replicate") else {2, 4, degree}):
        if degree % factor or degree == 1:
            continue
        after = axes.model_copy(
            update={source: degree // factor, target: axes.degree(target) * factor, "open": ()}
        )
        names = {"tensor_x": "tensor"} if after.tensor_y == 1 else {}
        degrees = [
            f"{names.get(axis, axis)}: {size}" for axis, size in after.model_dump().items() if size > 1
        ]
        rest: Change = ("strategy.sequence=false",) * (strategy.sequence and after.tensor == 1)
        if source == "pipeline" and after.pipeline == 1:
            rest = ("strategy.pipeline={}",)
        elif source == "pipeline" and strategy.pipeline.layers is not None:
            rest = ("strategy.pipeline.layers=null",)
        yield (f"strategy.axes={{{', '.join(degrees)}}}", *rest)


def _fewer_recomputed(run: RunConfig, peak: int, nothing_again: int, capacity: float) -> Iterator[Change]:
    """As few recomputed layers as the memory lasts for, since bytes are linear in their number. `peak`: bytes of the
    run; `nothing_again`: of the one that recomputes none."""
    layers = run.effective_strategy.memory.recompute_layers
    if layers is None and run.effective_strategy.axes.pipeline == 1:
        text = transformers_config(run.model).get_text_config(decoder=True)
        layers = getattr(text, "num_hidden_layers", None)
    if not isinstance(layers, int) or nothing_again <= max(peak, FILLED * capacity):
        return
    count = ceil(layers * (nothing_again - FILLED * capacity) / (nothing_again - peak))
    if 0 < count < layers:
        yield (f"strategy.memory.recompute_layers={count}",)
