"""Writes a planned strategy as a run file for `train`.

What `train` cannot run yet is written all the same, each with a note at the head of the file: DualPipe, and precisions
below 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.cluster import Cluster
from hyper_parallel.config import yaml12
from hyper_parallel.planner import format
from hyper_parallel.planner.codes import ORDERS
from hyper_parallel.planner.memory_budget import MemoryBudget
from hyper_parallel.planner.metrics import Figures
from hyper_parallel.planner.query import Question
from hyper_parallel.strategy import ScheduleName
from hyper_parallel.strategy.axes import AUTO
from hyper_parallel.workload.adapters import Adapter
from hyper_parallel.workload.to_config import to_config

LEVELS: Mapping[int, str] = {1: "optimizer", 2: "gradients", 3: "parameters"}
"""What `memory.shard` calls the ZeRO levels."""

PIPELINES: Mapping[str, str] = {
    "1f1b": ScheduleName.ONE_F_ONE_B.value,
    "gpipe": ScheduleName.GPIPE.value,
    "interleaved": ScheduleName.INTERLEAVED.value,
    "zb-h1": ScheduleName.ZB_H1.value,
    "zb-v": ScheduleName.ZB_V.value,
}
"""The planner's pipeline schedules that `train` has, by its names."""

RECOMPUTES: Mapping[str, str] = {"none": "none", "selective": "selective", "full": "layer"}
"""What `memory.recompute` calls the planner's kinds of recompute."""

_DTYPES = {
    "fp32": {"param": "float32", "compute": "float32", "reduce": "float32"},
    "bf16": {"param": "float32", "compute": "bfloat16", "reduce": "float32"},
}


@dataclass(frozen=True)
class PlannedRunFile:
    """A run file."""

    data: Mapping[str, Any]
    """Its keys and values."""
    text: str
    """YAML, with what was estimated and the notes as comments at its head."""
    notes: Sequence[str]


def planned_run_file(
    found: Figures,
    question: Question,
    model: Mapping[str, Any] | None = None,
    budget: MemoryBudget | None = None,
) -> PlannedRunFile:
    """The run file of a strategy.

    `model`: the section `model` of the file, where it is known; else a config of the shape's dimensions. `budget`:
    bytes of each tier; None where everything stays on the device.
    """
    notes: list[str] = []
    work, shape = question.workload, question.workload.shape
    if model is None:
        model = {"config": to_config(shape, work.sequence)}
        notes.append(
            f"model.config has the dimensions of {shape.name or 'the model'} in the plainest family that has them"
        )
    if work.adapter is not None:
        model = {**model, "adapter": _adapter(work.adapter, notes)}
    if work.prediction_modules:
        notes.append("train builds the model without the modules that predict one token more")
    train: dict[str, Any] = {
        "batch": work.batch,
        "micro_batch": int(found.strategy["micro"]),
        "optimizer": {"name": work.optimizer},
    }
    strategy = strategy_of(found, question.cluster, shape.layers, notes)
    if budget is not None:
        train["engine"] = "graph"
        strategy["memory"] |= budget.section(question.devices)
        if strategy["memory"]["recompute"] == RECOMPUTES["none"]:
            # Train computes again what is cheaper to compute than to copy.
            del strategy["memory"]["recompute"]
        notes.append("what lies on the host is written as a budget; which bytes move is planned by train")
    strategy["precision"] = _DTYPES.get(work.precision, _DTYPES["bf16"])
    if work.adapter is not None and work.adapter.base != "fp32":
        strategy["precision"] = {**strategy["precision"], "param": "bfloat16"}
    if work.precision not in _DTYPES:
        notes.append(
            f"train does not compute in {work.precision} yet; the file says bfloat16, which is slower"
        )
    data = {
        "version": 1,
        "out": f"runs/{shape.name or 'planned'}",
        "model": dict(model),
        "data": {"train": "python-stdlib", "sequence": work.sequence},
        "train": train,
        "strategy": strategy,
    }
    notes.append("data.train is a placeholder: name your text")
    head = [
        f"Written by hyper-parallel plan for {shape.name or 'a model'} on {question.devices:,} devices of "
        f"{question.cluster.name or question.cluster.source}.",
        f"Estimated: a step in {format.seconds(found)}; MFU {found.mfu:.1%}; peak {format.memory(found)}.",
        *notes,
    ]
    text = "".join(f"# {line}\n" for line in head) + yaml12.write(data)
    return PlannedRunFile(data, text, tuple(notes))


def _adapter(adapter: Adapter, notes: list[str]) -> dict[str, Any]:
    """The section `model.adapter`."""
    names = sorted(adapter.linear)
    if adapter.base not in ("fp32", "bf16"):
        notes.append(f"train does not keep frozen weights in {adapter.base}; the file says bfloat16")
    whole = adapter.targets == ("all-linear",)
    return {"rank": adapter.rank, "targets": "all-linear" if whole else names}


def strategy_of(found: Figures, cluster: Cluster, layers: int, notes: list[str]) -> dict[str, Any]:
    """The section `strategy` of a run file, for a model of so many layers; what it cannot say is added to `notes`."""
    given = found.strategy
    axes = _axes(given)
    made: dict[str, Any] = {"axes": axes}
    if given["expert"] != 1:
        axes["expert"] = given["expert"]
    if given["pipeline"] != 1:
        schedule = PIPELINES.get(str(given["schedule"]))
        if schedule is None:
            notes.append(
                f"train has no schedule {given['schedule']} and takes one of its own (auto); `plan --runnable` keeps "
                "to what it has"
            )
        made["pipeline"] = {"schedule": schedule or AUTO}
        if given["schedule"] == "interleaved":
            made["pipeline"]["virtual"] = given["virtual"]
    if given["sequence_parallel"] and given["tensor_x"] != 1:
        made["sequence"] = True
    if given["context"] != 1:
        made["context"] = {"method": given["method"]}
    if cluster.node and cluster.node < found.devices:
        inside = {"node": cluster.node}
        if cluster.supernode and cluster.supernode < found.devices:
            inside["supernode"] = cluster.supernode
        made["placement"] = {"devices": inside}
    made["memory"] = _memory(given, layers)
    return made


def _axes(given: format.Strategy) -> dict[str, Any]:
    """Degrees above 1, outer to inner."""
    inner_first = next(order for order in ORDERS if " ".join(order) == given["order"])
    names: list[str] = []
    for name in reversed(inner_first):
        names += ["replicate", "shard"] if name == "data" else [name]
    return {name: given[name] for name in names if given[name] != 1}


def _memory(given: format.Strategy, layers: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    level = int(given["zero"])
    if level:
        made["shard"] = LEVELS[level]
    made["recompute"] = RECOMPUTES[str(given["recompute"])]
    if given["recompute"] == "full" and float(given["recomputed"]) < 1:
        made["recompute_layers"] = _recomputed(given, layers)
    return made


def _recomputed(given: format.Strategy, layers: int) -> int | list[int]:
    """Layers of each stage that are recomputed: those of a rank, spread over its stages, the first stages first."""
    ranks, stages = int(given["pipeline"]), int(given["virtual"])
    count = math.ceil(float(given["recomputed"]) * math.ceil(layers / ranks) - 1e-9)
    if stages == 1 or ranks == 1:
        return count
    return [count // stages + (part < count % stages) for part in range(stages) for _ in range(ranks)]
