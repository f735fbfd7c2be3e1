"""The file of a predicted generation: model, strategy, inference and workload. `generate --config` reads it, too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from hyper_parallel.config.generate import GenerationStrategy
from hyper_parallel.config.generation_workload import GenerationWorkload
from hyper_parallel.config.inference import PredictedInference
from hyper_parallel.config.load import build, load_file
from hyper_parallel.config.predicted_model import PredictedModel, published
from hyper_parallel.hub.hub_id import parse
from hyper_parallel.strategy.section import Section


class GenerationRun(Section):
    """Generation whose time and memory are predicted: what generates, how, and for which requests."""

    version: Literal[1]
    """The version of the file's format."""
    model: PredictedModel
    """The model: a published one by its name, a config, or a folder."""
    strategy: GenerationStrategy = GenerationStrategy()
    """Axes, and the memory budget with its tiers."""
    inference: PredictedInference = PredictedInference()
    """How requests share the device."""
    workload: GenerationWorkload = GenerationWorkload()
    """The requests."""


def load_generation(given: str, overrides: Sequence[str] = ()) -> GenerationRun:
    """The run that a YAML file describes, or that of a published model, a Transformers folder or an id of the Hub, with
    dotted overrides.

    Raises ConfigError as `load` does.
    """
    path = Path(given).expanduser()
    if path.suffix in (".yaml", ".yml"):
        return load_file(GenerationRun, path, overrides)
    known = path.is_dir() or parse(given, "model") is not None
    model: Any = {"path": given} if known else published(given)
    return build(GenerationRun, [(given, {"version": 1, "model": model})], overrides)
