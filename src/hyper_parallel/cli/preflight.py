"""Cheap checks of a run, made before any worker starts and before anything is written: files and folders, and whether
the state of CPU workers fits into memory.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from hyper_parallel.config import RunConfig
from hyper_parallel.config.data import BUILTIN, no_tokenizer
from hyper_parallel.config.model import read_config
from hyper_parallel.config.rl import RLConfig
from hyper_parallel.data.sources import find
from hyper_parallel.errors import ConfigError, DataError
from hyper_parallel.launch.rendezvous import detect, workers_of
from hyper_parallel.proc import MEMORY, bytes_in
from hyper_parallel.schedule import check_pipeline
from hyper_parallel.strategy import recomputed_layers
from hyper_parallel.units import format_bytes, format_count
from hyper_parallel.workload.shape import Shape
from hyper_parallel.workload.workload import Workload, state_bytes

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Names that Transformers configs use for a model's number of layers."""
_POSITIONS = ("max_position_embeddings", "n_positions")
"""Names that Transformers configs use for a model's number of positions."""


def check(config: RunConfig, *, writes: bool = True) -> None:
    """Check that files and folders which the run file names exist, fit and are writable. `writes`: the run
    fills `out`.

    Raises ConfigError, or DataError for the declared text.
    """
    _text(config)
    _model(config)
    _tokenizer(config)
    _nodes(config)
    _layers(config)
    if writes:
        check_results(config)


def check_results(config: RunConfig | RLConfig) -> None:
    """Check that a run's results can be written: its trackers are installed, and its folder can be made.

    Raises ConfigError.
    """
    _trackers(config)
    _out(Path(config.out).expanduser())


def _text(config: RunConfig) -> None:
    data = config.data
    for key, declared in (("train", data.train), ("eval", data.eval)):
        if declared is None:
            continue
        sources = find(declared, data.format, key)
        if not any(source.size() for source in sources):
            raise DataError(f"data.{key}: {declared!r} holds no text: every file of it is empty")
        unreadable = next((f for s in sources for f in s.files() if not os.access(f, os.R_OK)), None)
        if unreadable is not None:
            raise DataError(f"data.{key}: {unreadable} cannot be read; check its permissions")
        if any(source.kind == "datasets" for source in sources):
            _installed("datasets", f"data.{key} names a datasets folder", "datasets")


def _model(config: RunConfig) -> None:
    model = config.model
    fields, named = _fields(config), "model.config"
    if model.path is not None:
        named = str(Path(str(model.folder)).expanduser() / "config.json")
    positions = next((fields[key] for key in _POSITIONS if isinstance(fields.get(key), int)), None)
    if positions is not None and config.data.sequence > positions:
        raise ConfigError(
            f"data.sequence: {config.data.sequence} tokens are more than the {positions} positions of the model "
            f"({named}); shorten the sequence or give the model more positions"
        )


def _fields(config: RunConfig) -> dict[str, Any]:
    """Fields of the model's Transformers config that are written."""
    return read_config(config.model.folder) if config.model.folder is not None else config.model.config or {}


def _layers(config: RunConfig) -> None:
    if config.open:
        return
    fields, strategy = _fields(config), config.effective_strategy
    layers = next((fields[key] for key in _LAYERS if isinstance(fields.get(key), int)), None)
    if strategy.axes.pipeline > 1:
        check_pipeline(strategy, config.micro_batches, layers)
    elif layers is not None:
        recomputed_layers(strategy.memory, [layers])


def _tokenizer(config: RunConfig) -> None:
    named = config.data.tokenizer
    own = config.model.folder if named.path is None and not named.replace else None
    for key, path in (("data.tokenizer.path", named.folder), ("model.path", own)):
        if path is not None and not (Path(path).expanduser() / "tokenizer.json").is_file():
            raise ConfigError(no_tokenizer(Path(path).expanduser(), key))
    template = named.chat_template
    if template not in (None, BUILTIN) and not Path(str(template)).expanduser().is_file():
        raise ConfigError(
            f"data.tokenizer.chat_template: {template} is no file; name a Jinja file, or {BUILTIN!r}"
        )


def _nodes(config: RunConfig) -> None:
    if config.open and config.launch.workers is None:
        return  # as many on each node as it has devices
    workers = config.launch.workers or config.strategy.world
    if workers % config.launch.nodes:
        raise ConfigError(
            f"launch.nodes: the {workers} workers of the strategy do not divide by {config.launch.nodes} nodes; "
            "change the axes or the nodes"
        )


def _trackers(config: RunConfig | RLConfig) -> None:
    for tracker in config.trackers:
        _installed(tracker, f"trackers names {tracker}", tracker)


def _installed(module: str, reason: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{reason}, which is not installed; pip install 'hyper-parallel[{extra}]'")


def _out(out: Path) -> None:
    """Check that the run's folder can be created and written to, without creating it."""
    there = out.absolute()
    while not there.exists() and not there.is_symlink():
        there = there.parent
    if not there.is_dir():
        raise ConfigError(f"out: {there} is a file, not a folder; name another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"out: cannot write to {there}; name another folder or change its permissions")


# Whether the parameters, gradients and optimizer state of CPU workers fit into this machine's memory.
#
# A lower bound in closed form from the model's config, made before any worker starts and without PyTorch: each of the
# `replicate` copies holds parameters, AdamW's two moments (or what another optimizer keeps), and gradients where the
# whole step keeps them. Activations and what a process takes by itself are not counted.

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
    fields = {"vocab_size": 1, **_fields(config)}  # a tokenizer's adds little
    try:
        shape = Shape.of_config(fields)
        return Workload(
            shape, config.train.batch, config.data.sequence, optimizer=config.train.optimizer.name
        )
    except (ConfigError, TypeError, ValueError, ArithmeticError):
        return None


def _accelerated(workers: int) -> bool:
    """Whether this machine's accelerators run that many workers. It needs PyTorch, and therefore comes last."""
    from hyper_parallel import compat

    return compat.backend("auto", workers=workers).name != "cpu"


def _available() -> int | None:
    """Memory that the system could give, swap included; None where it does not say."""
    free = bytes_in(MEMORY, "MemAvailable")
    return None if free is None else free + (bytes_in(MEMORY, "SwapFree") or 0)
