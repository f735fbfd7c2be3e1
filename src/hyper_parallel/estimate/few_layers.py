"""A step of many layers, predicted from steps of few: seconds and bytes of what a layer adds are taken for all.

    step(l) = step(b) + (l − b) · (step(b + p) − step(b)) / p            seconds, and their parts
    peak(l) = peak(b, room − (l − b) · h) + (l − b) · h                   h: bytes that a layer adds as the code is written

Collectives run ahead as far as memory lasts, so that a step of few layers is ordered within the room that all layers
leave it. What is captured and ordered does not grow with the model; the layers of a Transformers config that a number
alone describes are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from hyper_parallel import config as files
from hyper_parallel.cluster import Cluster
from hyper_parallel.config import RunConfig
from hyper_parallel.estimate.predict import predict_run
from hyper_parallel.estimate.prediction import Prediction, model_of
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
    layers, a pipeline, a budget, layers that are recomputed by number, or a config whose layers are not of one kind.

    Errors are those of `predict_run`.
    """
    strategy = run.effective_strategy
    given = dict(run.model.config or {})
    total = given.get(LAYERS)
    memory = strategy.memory
    if not isinstance(total, int) or total <= MANY or memory.device is not None:
        return None
    if strategy.axes.pipeline > 1 or memory.recompute_layers is not None or _listed(given, total):
        return None
    assert cluster.device is not None
    dense = int(given.get("first_k_dense_replace") or 0)
    short, long = dense + FIRST, dense + FIRST + MORE
    progress(f"capturing {short} and {long} of {total} layers")
    held = {
        layers: predict_run(_with_layers(run, layers), cluster, as_written=True).timeline.peak.bytes
        for layers in (short, long)
    }
    each = (held[long] - held[short]) / MORE
    written = held[short] + (total - short) * each
    if limit is not None and written > limit:
        return FewLayers(None, written, False, {}, None)
    progress("ordering and simulating them")
    capacity = cluster.device.memory.bytes / cluster.device.memory.ranks
    found: dict[int, Prediction] = {}
    for layers in (short, long):
        room = max(capacity - (total - layers) * each, held[layers])
        found[layers] = predict_run(_with_layers(run, layers), _with_memory(cluster, room))
    times = (total - short) / MORE
    first, second = found[short], found[long]
    names = {*first.parts, *second.parts}
    parts = {
        name: max(first.parts.get(name, 0.0) * (1 - times) + second.parts.get(name, 0.0) * times, 0.0)
        for name in names
    }
    seconds = first.timeline.step + times * (second.timeline.step - first.timeline.step)
    peak = max(second.timeline.peak.bytes + (total - long) * each, written if written <= capacity else 0.0)
    flops = flops_of_model(model_of(run, [])).per_token(run.data.sequence) * second.tokens
    share = mfu(flops, seconds, strategy.axes.world, second.timeline.peak_flops)
    return FewLayers(seconds, peak, peak <= capacity, parts, share)


def _with_layers(run: RunConfig, layers: int) -> RunConfig:
    """The run with so many layers."""
    data = run.model_dump(mode="json", exclude_unset=True)
    data["model"]["config"][LAYERS] = layers
    return files.from_dict(data, source="the planned file")


def _listed(given: Mapping[str, object], total: int) -> bool:
    """Whether a config says something of each layer."""
    return any(isinstance(value, list | tuple) and len(value) == total for value in given.values())


def _with_memory(cluster: Cluster, room: float) -> Cluster:
    """The cluster with so many bytes in each device's memory."""
    assert cluster.device is not None
    memory = replace(cluster.device.memory, bytes=room * cluster.device.memory.ranks)
    return replace(cluster, device=replace(cluster.device, memory=memory))
