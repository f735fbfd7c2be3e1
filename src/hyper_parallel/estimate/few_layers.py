"""A step of many layers, predicted from steps of few: what a layer adds is taken for all.

    step(l, r) = step(b, 0) + (l − b) · (step(b + p, 0) − step(b, 0)) / p
                 + r · (step(b + p, all) − step(b + p, 0)) / (b + p)

with l layers, of which r are computed again: seconds, their parts, and bytes as the code is written. Collectives run
ahead as far as memory lasts, so that a step of few layers is ordered within as much beyond its own bytes as all layers
leave free. What is captured and ordered does not grow with the model; layers that a Transformers config describes by
their number alone are alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from hyper_parallel import config as files
from hyper_parallel.cluster import Cluster
from hyper_parallel.config import RunConfig
from hyper_parallel.estimate.predict import predict_run
from hyper_parallel.estimate.prediction import model_of
from hyper_parallel.workload import flops_of_model
from hyper_parallel.workload.work import mfu

LAYERS = "num_hidden_layers"
FIRST, MORE = 4, 4
"""Layers of the shorter step beside those that are not like the others, and how many more the longer one has."""
MANY = 40
"""Layers above which a step is predicted from few: below that it is as quick to order all."""


@dataclass(frozen=True)
class FewLayers:
    """The predicted step of all layers."""

    seconds: float | None
    """None where it holds more than `limit` in the order of the model's code."""
    peak: float
    """Bytes of the fullest rank."""
    fits: bool
    parts: Mapping[str, float]
    """As of `Prediction.parts`."""
    mfu: float | None


def predict_few_layers(
    run: RunConfig, cluster: Cluster, limit: float | None, progress: Callable[[str], None]
) -> FewLayers | None:
    """The prediction of a run from steps of few of its layers; None where its step is to be predicted whole: it has few
    layers, a pipeline, a budget, or a config whose layers are not of one kind.

    Errors are those of `predict_run`.
    """
    strategy, memory = run.effective_strategy, run.effective_strategy.memory
    given = dict(run.model.config or {})
    total = given.get(LAYERS)
    if not isinstance(total, int) or total <= MANY or memory.device is not None:
        return None
    if strategy.axes.pipeline > 1 or _listed(given, total) or isinstance(memory.recompute_layers, list):
        return None
    assert cluster.device is not None
    dense = int(given.get("first_k_dense_replace") or 0)
    short, long = dense + FIRST, dense + FIRST + MORE
    again = memory.recompute_layers
    steps = [(short, again is None), (long, again is None), *([(long, True)] if again else [])]
    # Of each step, how often it counts.
    times = (total - short) / MORE
    counts = [1 - times, times]
    if again:
        counts = [1 - times, times - again / long, again / long]
    progress(f"capturing {short} and {long} of {total} layers")
    held = [
        predict_run(_with_layers(run, *step), cluster, as_written=True).timeline.peak.bytes for step in steps
    ]
    written = sum(count * one for count, one in zip(counts, held, strict=True))
    if limit is not None and written > limit:
        return FewLayers(None, written, False, {}, None)
    progress("ordering and simulating them")
    capacity = cluster.device.memory.bytes / cluster.device.memory.ranks
    free = max(capacity - written, 0.0)
    found = [
        predict_run(_with_layers(run, *step), _with_memory(cluster, bytes + free))
        for step, bytes in zip(steps, held, strict=True)
    ]

    seconds = sum(count * one.timeline.step for count, one in zip(counts, found, strict=True))
    parts: defaultdict[str, float] = defaultdict(float)
    for count, one in zip(counts, found, strict=True):
        for name, part in one.parts.items():
            parts[name] += count * part
    # How far collectives run ahead is that of the longer steps.
    ahead = max(one.timeline.peak.bytes - bytes for one, bytes in zip(found[1:], held[1:], strict=True))
    peak = written + max(ahead, 0.0)
    flops = flops_of_model(model_of(run, [])).per_token(run.data.sequence) * found[0].tokens
    of = found[0].timeline.peak_flops
    share = None if of is None else mfu(flops, seconds, strategy.axes.world, of)
    return FewLayers(
        seconds, peak, peak <= capacity, {name: max(part, 0.0) for name, part in parts.items()}, share
    )


def _with_layers(run: RunConfig, layers: int, as_given: bool) -> RunConfig:
    """The run with so many layers; unless `as_given`, none of them computed again."""
    data = run.model_dump(mode="json", exclude_unset=True)
    data["model"]["config"][LAYERS] = layers
    memory = data["strategy"].setdefault("memory", {})
    memory.pop("recompute_layers", None)
    if not as_given:
        memory["recompute"] = "none"
    return files.from_dict(data, source="the planned file")


def _listed(given: Mapping[str, object], total: int) -> bool:
    """Whether a config says something of each layer."""
    return any(isinstance(value, list | tuple) and len(value) == total for value in given.values())


def _with_memory(cluster: Cluster, room: float) -> Cluster:
    """The cluster with so many bytes in each device's memory."""
    assert cluster.device is not None
    memory = replace(cluster.device.memory, bytes=room * cluster.device.memory.ranks)
    return replace(cluster, device=replace(cluster.device, memory=memory))
