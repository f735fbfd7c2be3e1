"""A run file with the planner's choice filled in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_parallel import config as files
from hyper_parallel.cluster import Cluster
from hyper_parallel.config import RunConfig
from hyper_parallel.planner.constants import Constants, fitted
from hyper_parallel.planner.memory_budget import memory_budget
from hyper_parallel.planner.metrics import Figures
from hyper_parallel.planner.run_file import RECOMPUTES, strategy_of
from hyper_parallel.strategy.strategy import BUDGET

Overrides = Mapping[str, Any]
"""What is laid on a run file: the section `strategy`, and of `train` the micro-batch."""


def overrides_of(
    config: RunConfig, found: Figures, cluster: Cluster, layers: int, constants: Constants | None = None
) -> dict[str, Any]:
    """What is laid on the run file for a strategy of the planner's: only keys that the file leaves open.

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
