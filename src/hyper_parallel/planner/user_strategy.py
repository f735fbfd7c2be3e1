"""A user's strategy as table columns, from a run file, a strategy file or plain columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hyper_parallel import config
from hyper_parallel.config import yaml12
from hyper_parallel.errors import ConfigError
from hyper_parallel.planner.codes import ORDERS, code
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.run_file import LEVELS
from hyper_parallel.planner.table import SPREAD
from hyper_parallel.strategy import Strategy

DEGREES = ("replicate", "shard", "context", "tensor_x", "tensor_y", "pipeline")


def user_strategy(path: Path, question: Question, notes: list[str]) -> dict[str, float]:
    """The columns of the strategy in a file; what is taken otherwise than the file says is added to `notes`.

    A pipeline, which no run file can have yet, is read as `plan --out` writes it. Raises ConfigError for what is no
    strategy, and for one of another number of devices.
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
    plain, pipeline = _without_pipeline(data, question)
    work = question.workload
    micro: int | None = 1
    if "axes" in data:
        strategy = config.load_strategy(path) if not pipeline else _strategy(path, plain)
        notes.append(f"--compare {path}: says nothing of micro-batches; taken: 1 sequence")
    else:
        run = config.from_dict(plain, source=str(path)) if pipeline else config.load(path)
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
    columns = _of_strategy(strategy, question) | pipeline
    columns["order"] = float(_order(_outer_first(data) if pipeline else strategy.axes.order, columns))
    share = work.batch / (columns["replicate"] * columns["shard"])
    columns["micro"] = float(micro or max(1, int(share)))
    return columns


def _strategy(path: Path, data: Mapping[str, Any]) -> Strategy:
    """A Strategy's file whose pipeline was taken out."""
    try:
        return Strategy.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"--compare {path}: {where}: {first['msg']}") from None


def _without_pipeline(data: Mapping[str, Any], question: Question) -> tuple[dict[str, Any], dict[str, float]]:
    """The file without its pipeline, and the columns that this has."""
    section = data if "axes" in data else data.get("strategy")
    axes = section.get("axes") if isinstance(section, Mapping) else None
    if not isinstance(section, Mapping) or not isinstance(axes, Mapping) or axes.get("pipeline", 1) == 1:
        # Whatever is wrong with it is told where it is loaded.
        return dict(data), {}
    how = section.get("pipeline")
    columns = _of_columns(
        {"pipeline": axes["pipeline"], **(how if isinstance(how, Mapping) else {})}, question
    )
    rest = {name: value for name, value in section.items() if name != "pipeline"}
    rest["axes"] = {name: value for name, value in axes.items() if name != "pipeline"}
    return (rest if "axes" in data else {**data, "strategy": rest}), columns


def _outer_first(data: Mapping[str, Any]) -> tuple[str, ...]:
    """The axes in the order of the file, a pipeline among them."""
    section = data if "axes" in data else data["strategy"]
    return tuple("tensor_x" if name == "tensor" else name for name in section["axes"] if name != "expert")


def _of_strategy(strategy: Strategy, question: Question) -> dict[str, float]:
    axes, memory = strategy.axes, strategy.memory
    names = ("replicate", "shard", "context", "tensor_x", "tensor_y", "expert")
    columns = {name: float(axes.degree(name)) for name in names}
    levels = {name: level for level, name in LEVELS.items()}
    if axes.shard * axes.context > 1:
        columns["zero"] = float(levels[memory.shard])
    columns["sequence_parallel"] = float(axes.tensor > 1 and (strategy.sequence or axes.tensor_y > 1))
    columns["recompute"] = float(code("recompute", "full" if memory.recompute == "layer" else "none"))
    if axes.context > 1:
        columns["method"] = float(code("method", _method(strategy, question)))
    return columns


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
