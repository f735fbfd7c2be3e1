"""`strategy="auto"` inside another trainer.

Rank 0 looks at the machine, asks, simulates the best few and tells all ranks (`auto`). What it is asked is a run file
made for the purpose: the model's config, the global batch, the length of rows, and whatever the strategy leaves open.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel import compat
from hyper_parallel.compat.collectives import device_type
from hyper_parallel.compat.store import broadcast_text
from hyper_parallel.config import RunConfig, from_dict
from hyper_parallel.errors import ConfigError, HyperParallelError, IntegrationError
from hyper_parallel.launch import Worker
from hyper_parallel.planner.auto import choose, resolved
from hyper_parallel.planner.auto.machine import machine_of
from hyper_parallel.shard.lora_adapters import adapted_layers, adapters_of, without_adapters
from hyper_parallel.strategy import Strategy
from hyper_parallel.workload.adapters import Adapter as PlannedAdapter

log = logging.getLogger(__name__)

_calls = itertools.count()


@dataclass(frozen=True)
class AutoRequest:
    """What the planner is asked."""

    strategy: Strategy
    """With open axes."""
    model: nn.Module
    batch: int
    """Rows of a step, over all ranks."""
    rows: int
    """Rows that a rank computes at once."""
    length: int
    """Positions of a row."""


def planned(asked: AutoRequest, world: int) -> Strategy:
    """The strategy that rank 0 chooses, on every rank; a collective.

    Raises IntegrationError, on every rank, for a model that has no config, rows of unknown length, and where nothing
    fits.
    """
    config: Any = getattr(without_adapters(asked.model), "config", None)
    if config is None or asked.length < 1:
        lacks = "no Transformers config" if config is None else "rows whose length is not known beforehand"
        raise IntegrationError(
            f"strategy: auto plans by the model's config and the length of rows, and there is {lacks}; write the axes"
        )
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        run = _run(asked, folder)
        if world == 1:
            found = _chosen(run, world)
        else:
            text = _chosen(run, world) if dist.get_rank() == 0 else None
            found = broadcast_text(f"hyper_parallel/integration/strategy/{next(_calls)}", text)
        told = json.loads(found)
        if "error" in told:
            raise IntegrationError(told["error"])
        return resolved(run, told["laid"]).strategy


def _run(asked: AutoRequest, folder: str) -> RunConfig:
    strategy = asked.strategy.model_dump(mode="json")
    if "pipeline" in asked.strategy.axes.open:
        # The trainer's own loop runs the steps, and it runs no stages.
        strategy.pop("pipeline", None)
        strategy["chosen"] = [key for key in strategy["chosen"] if not key.startswith("pipeline.")]
        strategy["axes"] = {axis: degree for axis, degree in strategy["axes"].items() if axis != "pipeline"}
    return from_dict(
        {
            "version": 1,
            "out": folder,
            "model": {"path": folder, "adapter": _adapter(asked.model)},
            # Only how long rows are is read of it.
            "data": {"train": "python-stdlib", "sequence": asked.length},
            "train": {"batch": asked.batch, "micro_batch": asked.rows},
            "strategy": strategy,
        },
        source="strategy",
    )


def _adapter(model: nn.Module) -> dict[str, Any] | None:
    """The section `model.adapter` of a model with adapters; None without them, or for layers unknown to the planner."""
    layers = list(adapted_layers(model))
    names = sorted({name.rpartition(".")[2] for name, _ in layers})
    ranks = {adapter.a.out_features for _, layer in layers for adapter in adapters_of(layer)}
    if not ranks:
        return None
    try:
        PlannedAdapter(max(ranks), tuple(names))
    except ConfigError as error:
        log.info("strategy: every parameter counts as trained: %s", error)
        return None
    return {"rank": max(ranks), "targets": names}


def _chosen(run: RunConfig, world: int) -> str:
    """What rank 0 finds, or what is wrong, as JSON."""
    device = torch.device(device_type() if world > 1 else compat.backend("auto").name)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    worker = Worker(0, 0, world, local, device, compat.backend(device.type))
    try:
        with _script_unseen():
            found = choose(run, machine_of(run, worker, _say), world, _say)
    except HyperParallelError as error:
        return json.dumps({"error": str(error)})
    for line in found.lines:
        _say(line)
    return json.dumps({"laid": found.laid})


@contextlib.contextmanager
def _script_unseen() -> Iterator[None]:
    """Inside, processes that are started do not run the user's script first, which need not guard its main part."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _say(text: str) -> None:
    log.info("strategy: %s", text)
    print(f"strategy: {text}", flush=True)  # noqa: T201
