"""Compile options: whether graphs are compiled, and the artifact folder.

Decided by the run file and the device alone, never by a clock: compiled sums come out a little different, and the same
file must give the same numbers each time.
"""

from __future__ import annotations

from pathlib import Path

import torch

from hyper_parallel.compat import backend
from hyper_parallel.config import RunConfig
from hyper_parallel.workload import Flops

PAYS_FROM = 300.0
"""Seconds of computing from which `train.compile: auto` compiles: about ten times what a first compilation takes."""
_UTILISATION = 0.5
_UNKNOWN_PEAK = 1e11
"""FLOP/s of a device without a data sheet: a few processor cores with wide vectors."""


def artifacts_of(config: RunConfig, flops: Flops, device: torch.device | str) -> Path | None:
    """The folder of the artifacts, below the run's cache; None when nothing is to be compiled."""
    chosen = config.train.compile
    if config.effective_strategy.memory.device is not None:
        return None  # a compiled layer holds what no plan of the memory knows of
    if chosen == "auto":
        # What is measured operator by operator must be run so.
        chosen = config.train.profile is None and estimated_seconds(config, flops, device) >= PAYS_FROM
    return Path(config.data.cache).expanduser() / "compiled" if chosen else None


def estimated_seconds(config: RunConfig, flops: Flops, device: torch.device | str) -> float:
    """A rough estimate of how long the run computes, from its FLOPs and the device's peak."""
    tokens = config.train.steps * config.train.batch * config.data.sequence
    world = config.effective_strategy.axes.world
    compute = getattr(torch, config.effective_strategy.precision.compute)
    peak = backend(torch.device(device).type).peak_flops(compute) or _UNKNOWN_PEAK
    return flops.per_token(config.data.sequence) * tokens / world / (peak * _UTILISATION)
