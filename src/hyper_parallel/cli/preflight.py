"""Cheap checks of a run file, made before any worker starts and before anything is written."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from hyper_parallel.config import RunConfig
from hyper_parallel.config.data import BUILTIN
from hyper_parallel.config.model import read_config
from hyper_parallel.config.rl_run import RLConfig
from hyper_parallel.data.sources import find
from hyper_parallel.data.tokenizer_choice import absent
from hyper_parallel.errors import ConfigError, DataError
from hyper_parallel.schedule import check_pipeline
from hyper_parallel.strategy import recomputed_layers

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
    """Those of the model's Transformers config that are written."""
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
            raise ConfigError(absent(Path(path).expanduser(), key))
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
