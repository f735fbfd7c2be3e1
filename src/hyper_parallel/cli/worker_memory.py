"""Whether the parameters, gradients and optimizer state of CPU workers fit into this machine's memory.

A lower bound in closed form from the model's config, made before any worker starts and without PyTorch: each of the
`replicate` copies holds parameters, AdamW's two moments (or what another optimizer keeps), and gradients where the
whole step keeps them. Activations and what a process takes by itself are not counted.
"""

from __future__ import annotations

import os

from hyper_parallel.config import RunConfig
from hyper_parallel.config.model import read_config
from hyper_parallel.errors import ConfigError
from hyper_parallel.launch.launcher_env import detect
from hyper_parallel.launch.world import workers_of
from hyper_parallel.proc import MEMORY, bytes_in
from hyper_parallel.units import format_bytes, format_count
from hyper_parallel.workload.optimizer_state import state_bytes
from hyper_parallel.workload.shape import Shape
from hyper_parallel.workload.workload import Workload

MARGIN = 1.2
"""What is needed may exceed what is available this many times before a run is refused."""


def check_memory(config: RunConfig, available: int | None = None) -> None:
    """Refuse a run on CPUs whose workers on this machine clearly need more memory than there is.

    Runs with a memory budget or adapters, under a launcher, on accelerators, and of models whose number of parameters
    is not known from their config are not checked. `available`: bytes, read from the system where not given.
    Raises ConfigError.
    """
    available = _available() if available is None else available
    if available is None or config.strategy.memory.device is not None or config.model.adapter is not None:
        return
    workload = _workload(config)
    if workload is None or detect(os.environ, config.launch.rendezvous) is not None:
        return
    width = 2 if config.strategy.precision.param == "bfloat16" else 4
    of_each = width + state_bytes(workload) * width / 4  # moments have the parameters' dtype
    if config.train.clip is not None or (not config.open and config.micro_batches > 1):
        of_each += width  # all gradients are there at once
    copies, parameters = config.effective_strategy.axes.replicate, workload.shape.parameters
    state = parameters * of_each * copies / config.launch.nodes
    # What a process takes beside it is left out: it is not measured, and small models may have any number of workers.
    if state <= MARGIN * available or config.launch.device not in ("auto", "cpu"):
        return
    workers = workers_of(config) // config.launch.nodes
    if config.launch.device == "auto" and _accelerated(workers):
        return
    mend = "share the parameters (axes.shard in place of replicate), " if copies > 1 else ""
    raise ConfigError(
        f"{workers} CPU worker{'s' * (workers > 1)} on this machine need at least "
        f"{format_bytes(round(state))} ({format_count(parameters)} parameters with gradients and "
        f"optimizer state), and {format_bytes(available)} are available; {mend}set a budget (strategy.memory.device "
        "and memory.flash), or take a smaller model; `inspect` and `simulate` need no such memory"
    )


def _workload(config: RunConfig) -> Workload | None:
    """The run's model and optimizer; None where the config does not tell the model's sizes."""
    fields = dict(read_config(config.model.folder) if config.model.folder else config.model.config or {})
    fields.setdefault("vocab_size", 1)  # a tokenizer's, which adds little
    try:
        shape = Shape.of_config(fields)
        return Workload(
            shape, config.train.batch, config.data.sequence, optimizer=config.train.optimizer.name
        )
    except (ConfigError, TypeError, ValueError, ArithmeticError):
        return None


def _accelerated(workers: int) -> bool:
    """Whether accelerators run so many workers. Needs PyTorch, so it is asked last."""
    from hyper_parallel import compat

    return compat.backend("auto", workers=workers).name != "cpu"


def _available() -> int | None:
    """Memory that the system could give, swap included; None where it does not say."""
    free = bytes_in(MEMORY, "MemAvailable")
    return None if free is None else free + (bytes_in(MEMORY, "SwapFree") or 0)
