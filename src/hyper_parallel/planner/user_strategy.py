"""A user's strategy as table columns, from a run file, a strategy file or plain columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyper_parallel import config
from hyper_parallel.config import yaml12
from hyper_parallel.errors import ConfigError
from hyper_parallel.planner.codes import ORDERS, code
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.run_file import LEVELS, RECOMPUTES
from hyper_parallel.planner.table import SPREAD
from hyper_parallel.schedule import stages_of
from hyper_parallel.strategy import ScheduleName, Strategy
from hyper_parallel.strategy.axes import AUTO

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

DEGREES = ("replicate", "shard", "context", "tensor_x", "tensor_y", "pipeline")


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
    columns = _of_columns(data, question) if plain else _of_file(path, data, question, notes)
    found = {**SPREAD, **columns}
    product = math.prod(found[axis] for axis in DEGREES)
    if product != question.devices:
        raise ConfigError(
            f"--compare {path}: its axes multiply to {product:g}, and the question is of {question.devices:,} devices; "
            "give --devices, or a strategy for as many"
        )
    return found


def _of_columns(data: Mapping[str, Any], question: Question) -> dict[str, float]:
    asked = Question(workload=question.workload, cluster=question.cluster, devices=question.devices, fix=data)
    return {name: (asked.allowed(name) or (0.0,))[0] for name in asked.fix}


def _of_file(path: Path, data: Mapping[str, Any], question: Question, notes: list[str]) -> dict[str, float]:
    """Of a run file, or of a Strategy's."""
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
    columns["order"] = float(_order(_outer_first(strategy), columns))
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


def _outer_first(strategy: Strategy) -> tuple[str, ...]:
    """The axes in the order of the file, a pipeline among them."""
    axes = strategy.axes
    return (*axes.order[: axes.outside], "pipeline", *axes.order[axes.outside :])


def _of_strategy(strategy: Strategy, question: Question) -> dict[str, float]:
    axes, memory = strategy.axes, strategy.memory
    names = ("replicate", "shard", "context", "tensor_x", "tensor_y", "expert")
    columns = {name: float(axes.degree(name)) for name in names}
    levels = {name: level for level, name in LEVELS.items()}
    if axes.shard * axes.context > 1:
        columns["zero"] = float(levels[memory.shard])
    columns["sequence_parallel"] = float(axes.tensor > 1 and (strategy.sequence or axes.tensor_y > 1))
    columns |= recompute_columns(strategy, question.workload.shape.layers)
    if axes.context > 1:
        columns["method"] = float(code("method", _method(strategy, question)))
    return columns


def recompute_columns(strategy: Strategy, layers: int) -> dict[str, float]:
    """The columns of what a strategy recomputes in a model of so many layers; a list of stages by its mean."""
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
