"""Run files of strategies: a planned strategy as a file for `train`, and a user's file as a strategy of the planner.

What `train` cannot run yet is written all the same, each with a note at the head of the file: DualPipe, and precisions
below 16 bits. A strategy that puts bytes on the host is written with a memory budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel import config
from hyper_parallel.cluster import Cluster
from hyper_parallel.config import yaml12
from hyper_parallel.errors import ConfigError
from hyper_parallel.planner import format
from hyper_parallel.planner.columns import ORDERS, code
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.memory import HOST_PART
from hyper_parallel.planner.metrics import Figures
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.table import DEGREES, SPREAD
from hyper_parallel.schedule import stages_of
from hyper_parallel.strategy import ScheduleName, Strategy
from hyper_parallel.strategy.axes import AUTO
from hyper_parallel.workload.transformers_config import to_config
from hyper_parallel.workload.workload import Adapter

LEVELS: Mapping[int, str] = {1: "optimizer", 2: "gradients", 3: "parameters"}
"""What `memory.shard` calls the ZeRO levels."""
ZERO: Mapping[str, int] = {name: level for level, name in LEVELS.items()}

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
        notes.append(f"model.config has the dimensions of {shape.title} in the plainest family that has them")
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
        f"Written by hyper-parallel plan for {shape.title} on {question.devices:,} devices of "
        f"{question.cluster.title}.",
        figures_line(found),
        *notes,
    ]
    text = "".join(f"# {line}\n" for line in head) + yaml12.write(data)
    return PlannedRunFile(data, text, tuple(notes))


def figures_line(found: Figures, word: str = "Estimated") -> str:
    """What the head of a run file says of its step."""
    return f"{word}: a step in {format.seconds(found)}; MFU {found.mfu:.1%}; peak {format.memory(found)}."


def _adapter(adapter: Adapter, notes: list[str]) -> dict[str, Any]:
    """The section `model.adapter`."""
    names = sorted(adapter.linear)
    if adapter.base not in ("fp32", "bf16"):
        notes.append(f"train does not keep frozen weights in {adapter.base}; the file says bfloat16")
    whole = adapter.targets == ("all-linear",)
    return {"rank": adapter.rank, "targets": "all-linear" if whole else names}


def strategy_of(found: Figures, cluster: Cluster, layers: int, notes: list[str]) -> dict[str, Any]:
    """The section `strategy` of a run file, for a model of `layers` layers; what it cannot say is added to `notes`."""
    given = found.strategy
    axes = _axes(given)
    section: dict[str, Any] = {"axes": axes}
    if given["expert"] != 1:
        axes["expert"] = given["expert"]
    if given["pipeline"] != 1:
        schedule = PIPELINES.get(str(given["schedule"]))
        if schedule is None:
            notes.append(
                f"train has no schedule {given['schedule']} and takes one of its own (auto); `plan --runnable` keeps "
                "to what it has"
            )
        section["pipeline"] = {"schedule": schedule or AUTO}
        if given["schedule"] == "interleaved":
            section["pipeline"]["virtual"] = given["virtual"]
    if given["sequence_parallel"] and given["tensor_x"] != 1:
        section["sequence"] = True
    if given["context"] != 1:
        section["context"] = {"method": given["method"]}
    if cluster.node and cluster.node < found.devices:
        inside = {"node": cluster.node}
        if cluster.supernode and cluster.supernode < found.devices:
            inside["supernode"] = cluster.supernode
        section["placement"] = {"devices": inside}
    section["memory"] = _memory(given, layers)
    return section


def _axes(given: format.Strategy) -> dict[str, Any]:
    """Degrees above 1, outer to inner."""
    inner_first = next(order for order in ORDERS if " ".join(order) == given["order"])
    names: list[str] = []
    for name in reversed(inner_first):
        names += ["replicate", "shard"] if name == "data" else [name]
    # One tensor axis is `tensor`; a second one is told apart from it.
    alone = {"tensor_x": "tensor"} if given["tensor_y"] == 1 else {}
    return {alone.get(name, name): given[name] for name in names if given[name] != 1}


def _memory(given: format.Strategy, layers: int) -> dict[str, Any]:
    section: dict[str, Any] = {}
    level = int(given["zero"])
    if level:
        section["shard"] = LEVELS[level]
    section["recompute"] = RECOMPUTES[str(given["recompute"])]
    if given["recompute"] == "full" and float(given["recomputed"]) < 1:
        section["recompute_layers"] = _recomputed(given, layers)
    return section


def _recomputed(given: format.Strategy, layers: int) -> int | list[int]:
    """Layers of each stage that are recomputed: those of a rank, spread over its stages, the first stages first."""
    ranks, stages = int(given["pipeline"]), int(given["virtual"])
    count = math.ceil(float(given["recomputed"]) * math.ceil(layers / ranks) - 1e-9)
    if stages == 1 or ranks == 1:
        return count
    return [count // stages + (part < count % stages) for part in range(stages) for _ in range(ranks)]


_SCHEDULES: Mapping[str, tuple[str, bool]] = {
    ScheduleName.GPIPE: ("gpipe", True),
    ScheduleName.ONE_F_ONE_B: ("1f1b", True),
    ScheduleName.ONE_F_ONE_B_SPLIT: ("1f1b", False),
    ScheduleName.INTERLEAVED: ("interleaved", True),
    ScheduleName.ZB_H1: ("zb-h1", True),
    ScheduleName.ZB_H2: ("zb-h1", False),
    ScheduleName.ZB_V: ("zb-v", True),
    ScheduleName.V_HALF: ("zb-v", False),
    ScheduleName.V_MIN: ("zb-v", False),
    ScheduleName.DUAL_PIPE_V: ("zb-v", False),
    AUTO: ("zb-h1", False),
}
"""A file's schedule to the planner's that is like it, and whether they are the same."""


def user_strategy(path: Path, question: Question, notes: list[str]) -> dict[str, float]:
    """The columns of the strategy in a file; what is taken otherwise than the file says is added to `notes`.

    Raises ConfigError for what is no strategy, and for one of another number of devices.
    """
    try:
        data = yaml12.parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--compare {path}: cannot be read: {error}") from None
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"--compare {path}: must be a run file, a strategy, or columns such as 'tensor_x: 8'"
        )
    plain = not set(data) & {"axes", "strategy", "model", "version", "extends"}
    if plain:
        asked = Question(
            workload=question.workload, cluster=question.cluster, devices=question.devices, fix=data
        )
        columns = {name: (asked.allowed(name) or (0.0,))[0] for name in asked.fix}
    else:
        columns = _of_file(path, data, question, notes)
    found = {**SPREAD, **columns}
    product = math.prod(found[axis] for axis in DEGREES)
    if product != question.devices:
        raise ConfigError(
            f"--compare {path}: its axes multiply to {product:g}, and the question is of {question.devices:,} devices; "
            "give --devices, or a strategy for as many"
        )
    return found


def _of_file(path: Path, data: Mapping[str, Any], question: Question, notes: list[str]) -> dict[str, float]:
    """The columns of a run file, or of a Strategy's."""
    work = question.workload
    micro: int | None = 1
    if "axes" in data:
        strategy = config.load_strategy(path)
        notes.append(f"--compare {path}: says nothing of micro-batches; taken: 1 sequence")
    else:
        run = config.load(path)
        strategy, micro = run.strategy, run.train.micro_batch
        if (run.train.batch, run.data.sequence) != (work.batch, work.sequence):
            notes.append(
                f"--compare {path}: has {run.train.batch:,} × {run.data.sequence:,} tokens a step; compared at "
                f"{work.batch:,} × {work.sequence:,}"
            )
    if strategy.open:
        raise ConfigError(
            f"--compare {path}: leaves {', '.join(strategy.axes.open)} to the planner, so there is nothing to compare; "
            "write the degrees"
        )
    columns = _of_strategy(strategy, question) | _of_pipeline(path, strategy, notes)
    axes = strategy.axes
    # A pipeline is among the axes of the file, between those outside of its stages and those inside.
    outer_first = (*axes.order[: axes.outside], "pipeline", *axes.order[axes.outside :])
    columns["order"] = float(_order(outer_first, columns))
    share = work.batch / (columns["replicate"] * columns["shard"])
    columns["micro"] = float(micro or max(1, int(share)))
    return columns


def _of_pipeline(path: Path, strategy: Strategy, notes: list[str]) -> dict[str, float]:
    if strategy.axes.pipeline == 1:
        return {"pipeline": 1.0}
    given = strategy.pipeline
    name, same = _SCHEDULES[given.schedule]
    if not same:
        notes.append(f"--compare {path}: schedule {given.schedule} is estimated as {name}")
    if given.layers is not None:
        notes.append(f"--compare {path}: pipeline.layers is left out; the estimate has even stages")
    virtual = given.virtual or (2 if name in ("interleaved", "zb-v") else 1)
    return {
        "pipeline": float(strategy.axes.pipeline),
        "schedule": float(code("schedule", name)),
        "virtual": float(virtual),
    }


def _of_strategy(strategy: Strategy, question: Question) -> dict[str, float]:
    axes, memory = strategy.axes, strategy.memory
    names = ("replicate", "shard", "context", "tensor_x", "tensor_y", "expert")
    columns = {name: float(axes.degree(name)) for name in names}
    if axes.shard * axes.context > 1:
        columns["zero"] = float(ZERO[memory.shard])
    columns["sequence_parallel"] = float(axes.tensor > 1 and (strategy.sequence or axes.tensor_y > 1))
    columns |= recompute_columns(strategy, question.workload.shape.layers)
    if axes.context > 1:
        columns["method"] = float(code("method", _method(strategy, question)))
    return columns


def recompute_columns(strategy: Strategy, layers: int) -> dict[str, float]:
    """The columns of what a strategy recomputes in a model of `layers` layers; a list of stages by its mean."""
    memory, ranks = strategy.memory, strategy.axes.pipeline
    kinds = {name: kind for kind, name in RECOMPUTES.items()}
    found = {"recompute": float(code("recompute", kinds.get(memory.recompute, "none")))}
    if memory.recompute_layers is not None:
        stages = stages_of(strategy.pipeline, ranks)
        asked = memory.recompute_layers
        each = asked if isinstance(asked, int) else sum(asked) / stages
        found["recomputed"] = min(1.0, each * (stages // ranks) / math.ceil(layers / ranks))
    return found


def _method(strategy: Strategy, question: Question) -> str:
    """As HyperShard chooses where the file leaves it open: Ulysses as far as no head is sent twice."""
    method, context = strategy.context.method, strategy.axes.context
    if method != "auto":
        return method
    inner = math.gcd(context, max(1, question.workload.shape.kv_heads // strategy.axes.tensor))
    return "ulysses" if inner == context else "hybrid" if inner > 1 else "ring"


def _order(outer_first: tuple[str, ...], columns: Mapping[str, float]) -> int:
    """The first order of axes in which those above 1 lie as in the file; 0 where none is like it."""
    laid = [name for name in reversed(outer_first) if columns[name] > 1]
    inner_first = list(dict.fromkeys("data" if name in ("shard", "replicate") else name for name in laid))
    for index, order in enumerate(ORDERS):
        if [name for name in order if name in inner_first] == inner_first:
            return index
    return 0


def runnable_note(shown: Iterable[tuple[str, Figures]]) -> list[str]:
    """A line that names the shown strategies which `train` refuses; none where it runs all of them. Each comes with the
    name under which it is shown.
    """
    refused = [
        name
        for name, found in shown
        if found.strategy["pipeline"] != 1 and found.strategy["schedule"] not in PIPELINES
    ]
    if not refused:
        return []
    return [
        f"train refuses {format.joined(refused)}: it has no DualPipe; --runnable keeps to what train runs"
    ]


# Memory budgets of a planned run: bytes of each tier that a rank may use, from the cluster's description.
#
#     device   (capacity − outside) / slack      as the planner's own limit (`cost_model.memory.fits`): what an
# allocator
#                                                cannot give back, the driver and the collectives' buffers lie beside it
#     host     HOST_PART · host / ranks          the rest is the system's, the data's and the framework's
#     pool     HOST_PART · pool / ranks − host   only beyond the host's part, since a pool is made of hosts' memory
#
# A strategy that keeps everything on the device needs no budget. `train` moves as little as the budget allows, whatever
# shares the estimate had, so the budget states the limits and not the estimate's bytes.

MIB = 1 << 20


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes that a rank may use; 0 where there are none."""

    device: int
    host: int
    pool: int = 0

    def section(self, world: int) -> dict[str, str]:
        """The keys of `strategy.memory`; `pool` is of all ranks together."""
        found = {"device": self.device, "host": self.host, "pool": self.pool * world}
        return {tier: f"{bytes // MIB}MiB" for tier, bytes in found.items() if bytes >= MIB}


def memory_budget(cluster: Cluster, constants: Constants, needed: float = 0.0) -> MemoryBudget:
    """The memory that each rank of a cluster may use. `needed`: bytes beside the device; a pool is used only beyond the
    host.

    The cluster describes a device; without a host its bytes are 0.
    """
    assert cluster.device is not None
    memory, host, pool = cluster.device.memory, cluster.host, cluster.pool
    device = constants.usable(memory.bytes / memory.ranks)
    own = HOST_PART * host.bytes / host.ranks if host is not None else 0.0
    more = 0.0
    if pool is not None and needed > own:
        more = max(HOST_PART * pool.bytes / pool.ranks - own, 0.0)
    return MemoryBudget(max(int(device), 0), int(own), int(more))
