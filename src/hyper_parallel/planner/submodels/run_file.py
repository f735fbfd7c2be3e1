"""Writes an allocation as a run file that `train` accepts as it is."""

from __future__ import annotations

from typing import Any

from hyper_parallel.config import RunConfig, from_dict, yaml12
from hyper_parallel.planner.submodels.answer import Answer
from hyper_parallel.planner.submodels.sizes import Sizes, Task

_PRECISION = {"param": "float32", "compute": "bfloat16", "reduce": "float32"}
_AXES = (
    "axes",
    "submodels",
    "placement",
    "pipeline",
    "context",
    "sequence",
    "tries",
    "tries_seconds",
    "cluster",
    "chosen",
)
"""Keys of a strategy that say where its parts lie, or leave that to the planner."""


def allocated_run_file(config: RunConfig, answer: Answer) -> tuple[str, list[str]]:
    """The text of the run file of the better allocation, and notes on what was changed in it besides the strategy."""
    notes: list[str] = []
    task, sizes = answer.found.task, answer.found.chosen.sizes
    assert sizes is not None, "an answer has an allocation that fits"
    data: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True)
    strategy = {key: value for key, value in (data.get("strategy") or {}).items() if key not in _AXES}
    strategy["memory"] = {"shard": sizes.shard, "recompute": "layer"}
    strategy.setdefault("precision", _PRECISION)
    if strategy["precision"].get("compute") != "bfloat16":
        notes.append("the run computes in another dtype than bfloat16, in which steps were simulated")
    strategy |= _parts(task, sizes)
    data["strategy"] = strategy
    train = {
        key: value for key, value in (data.get("train") or {}).items() if key not in ("compile", "profile")
    }
    train["micro_batch"] = sizes.rows * sizes.data if sizes.encoders else sizes.rows
    train["engine"] = "graph" if sizes.encoders else "eager"
    data["train"] = train
    launch = {key: value for key, value in (data.get("launch") or {}).items() if key != "workers"}
    data["launch"] = {**launch, "workers": sizes.devices}
    from_dict(data, source="the planned run file")
    head = [f"Written by hyper-parallel plan for {answer.cluster}.", f"Simulated: {answer.verdict}.", *notes]
    return "".join(f"# {line}\n" for line in head) + yaml12.write(data), notes


def _parts(task: Task, sizes: Sizes) -> dict[str, Any]:
    """The sections of the strategy that say where parts lie."""
    degrees = {"pipeline": sizes.pipeline, "shard": sizes.data, "tensor": sizes.tensor}
    axes = {name: degree for name, degree in degrees.items() if degree > 1}
    if not sizes.encoders:
        return {"axes": axes}
    encoders = {
        each.name: {"modules": list(each.modules), "axes": {"shard": count}}
        for each, count in zip(task.costs.encoders, sizes.encoders, strict=True)
    }
    return {"submodels": {**encoders, "language": {"axes": axes}}}
