"""The run file of a run with open axes: the query that it asks the planner, and itself with the choice filled in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_parallel import config as files
from hyper_parallel.cluster import Cluster
from hyper_parallel.config import RunConfig
from hyper_parallel.data.tokenizer import load as load_tokenizer
from hyper_parallel.planner.auto.machine import budgeted
from hyper_parallel.planner.constants import Constants, fitted
from hyper_parallel.planner.format import ON_HOST
from hyper_parallel.planner.framework_profiles import profile
from hyper_parallel.planner.metrics import Figures
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.run_file import (
    PIPELINES,
    RECOMPUTES,
    ZERO,
    memory_budget,
    recompute_columns,
    strategy_of,
)
from hyper_parallel.step.build import transformers_config
from hyper_parallel.strategy import AXIS_NAMES
from hyper_parallel.strategy.strategy import BUDGET
from hyper_parallel.workload.shape import Shape
from hyper_parallel.workload.workload import Adapter, Precision, Workload

Overrides = Mapping[str, Any]
"""Overrides of a run file: the section `strategy`, and of `train` the micro-batch."""


def overrides_of(
    config: RunConfig, found: Figures, cluster: Cluster, layers: int, constants: Constants | None = None
) -> dict[str, Any]:
    """Overrides of the run file for a strategy of the planner's: only keys that the file leaves open.

    `layers`: of the model. `constants`: of the machine, from which a budget's margin is; default: the fitted ones.
    """
    constants = constants or fitted()
    made = strategy_of(found, cluster, layers, [])
    strategy: dict[str, Any] = {"axes": made["axes"] or {"replicate": 1}}
    if not config.strategy.axes.open:
        strategy["axes"] = config.strategy.axes.model_dump(mode="json")  # in the file's order
    chosen = set(config.strategy.chosen)
    budget = memory_budget(cluster, constants, found.on_host) if found.on_host else None
    if budget is not None:
        if BUDGET in chosen:
            made["memory"] |= budget.section(found.devices)
            chosen |= {"memory.host", "memory.pool"}
        if made["memory"]["recompute"] == RECOMPUTES["none"]:
            del made["memory"]["recompute"]  # train computes again what is cheaper to compute than to copy
    if "memory.recompute" in chosen:
        chosen.add("memory.recompute_layers")
    for key in sorted(chosen):
        section, _, name = key.rpartition(".")
        if not section:
            strategy[name] = made.get(name, False)
        elif name in made.get(section, {}):
            strategy.setdefault(section, {})[name] = made[section][name]
    if "placement" in made and not config.strategy.placement.given:
        strategy["placement"] = made["placement"]
    return {"train": {"micro_batch": int(found.strategy["micro"])}, "strategy": strategy}


def resolved(config: RunConfig, laid: Overrides, source: str = "the planned strategy") -> RunConfig:
    """The run with what was chosen. Raises ConfigError where the two do not go together."""
    data = config.model_dump(mode="json")
    settled = ("chosen", "cluster", "tries", "tries_seconds")
    strategy = {key: value for key, value in data["strategy"].items() if key not in settled}
    for key, value in laid["strategy"].items():
        inside = isinstance(value, Mapping) and key != "axes"
        strategy[key] = {**strategy.get(key, {}), **value} if inside else value
    if "pipeline" in strategy and "pipeline" not in strategy["axes"]:
        del strategy["pipeline"]
    train = {**data["train"], **laid["train"]}
    return files.from_dict({**data, "strategy": strategy, "train": train}, source=source)


_PRECISIONS: dict[str, Precision] = {"float32": "fp32", "bfloat16": "bf16"}


def question_of(
    config: RunConfig,
    cluster: Cluster,
    world: int,
    top: int,
    *,
    pipelines: bool = False,
    moves: bool = False,
    constants: Constants | None = None,
) -> Question:
    """The question: everything that the file writes is fixed, the rest is what `train` can run.

    Where the file leaves `axes.pipeline` open: of strategies without a pipeline, or of `pipelines` only.
    `moves`: where the file leaves the budget open, whether anything may lie on the host. A memory budget takes the
    place of the device's memory, and its tiers of the host's. `constants`: of the machine; default: the fitted ones.
    Raises ConfigError for a model that cannot be read.
    """
    given = config.strategy.memory.device is not None
    if given:
        cluster = budgeted(config.strategy.memory, cluster, world, constants or fitted())
    workload = workload_of(config)
    return Question(
        workload=workload,
        cluster=cluster,
        profile=profile("hyper-parallel"),
        devices=world,
        fix={
            **_fixed(config, workload.shape.layers, range(2, world + 1) if pipelines else range(1, 2)),
            **({} if given or moves else dict.fromkeys(ON_HOST, 0.0)),
        },
        top=top,
        runnable=True,
    )


def workload_of(config: RunConfig) -> Workload:
    """The workload of a step of the run."""
    fields: dict[str, Any] = transformers_config(config.model).to_dict()
    given = config.model.config
    if given is not None and "vocab_size" not in given:
        # As training fills it in, but for a tokenizer that is yet to be trained: that may come out smaller.
        path = config.data.tokenizer.folder
        fields["vocab_size"] = (
            config.data.tokenizer.trained_size if path is None else load_tokenizer(path).vocab_size
        )
    return Workload(
        Shape.of_config(fields, str(fields.get("model_type", "the model"))),
        config.train.batch,
        config.data.sequence,
        precision_of(config),
        config.train.optimizer.name,
        adapter_of(config),
    )


def adapter_of(config: RunConfig) -> Adapter | None:
    """The adapters that a run trains; frozen weights are kept in the strategy's dtype of parameters."""
    declared = config.model.adapter
    if declared is None:
        return None
    targets = (declared.targets,) if isinstance(declared.targets, str) else declared.targets
    return Adapter(declared.rank, targets, "fp32" if config.strategy.precision.param == "float32" else "bf16")


def precision_of(config: RunConfig) -> Precision:
    """The precision of products."""
    return _PRECISIONS[config.strategy.precision.compute]


def why_no_pipeline(config: RunConfig) -> str | None:
    """The key of a run with open axes that excludes pipelines, in a few words; None where they may be chosen."""
    strategy, train = config.strategy, config.train
    found = {
        "the file writes axes.pipeline": "pipeline" not in strategy.axes.open,
        "train.engine is eager": train.engine != "graph",
        "train.compile is true": train.compile is True,
        "train.profile is set": train.profile is not None,
        "memory.device sets a budget": strategy.memory.device is not None,
        "memory.recompute_layers is set": strategy.memory.recompute_layers is not None,
    }
    return next((key for key, holds in found.items() if holds), None)


def _fixed(config: RunConfig, layers: int, pipelines: range) -> dict[str, Any]:
    """Columns of the strategy that the file writes. `layers`: of the model; `pipelines`: degrees where that is open."""
    strategy = config.strategy
    axes, chosen = strategy.axes, strategy.chosen
    fixed: dict[str, Any] = {
        axis: axes.degree(axis) for axis in (*AXIS_NAMES, "expert") if axis not in axes.open
    }
    fixed["pipeline"] = pipelines if "pipeline" in axes.open else axes.pipeline
    named = {schedule: name for name, schedule in PIPELINES.items()}
    if fixed["pipeline"] != range(1, 2) and strategy.pipeline.schedule in named:
        fixed["schedule"] = named[strategy.pipeline.schedule]
    if fixed["pipeline"] != range(1, 2) and strategy.pipeline.virtual is not None:
        fixed["virtual"] = strategy.pipeline.virtual
    if config.train.micro_batch is not None:
        fixed["micro"] = config.train.micro_batch
    if "memory.shard" not in chosen:
        fixed["zero"] = (0, ZERO[strategy.memory.shard])
    if "memory.recompute" not in chosen:
        fixed |= recompute_columns(strategy, layers)
    if "context.method" not in chosen and strategy.context.method != "auto":
        fixed["method"] = strategy.context.method
    if "sequence" not in chosen and not strategy.sequence and axes.tensor_y == 1:
        # The second side of 2D tensor parallelism splits the sequence whatever the file says.
        fixed["sequence_parallel"] = 0
    return fixed
