"""The file of a predicted generation: model, strategy, inference and workload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator

from hyper_parallel.config.generation_workload import GenerationWorkload
from hyper_parallel.config.inference import Inference
from hyper_parallel.config.load import build, load_file
from hyper_parallel.config.model import ModelConfig
from hyper_parallel.strategy import Strategy
from hyper_parallel.strategy.section import Section
from hyper_parallel.workload.published import shape
from hyper_parallel.workload.to_config import to_config


class GenerationRun(Section):
    """Generation whose time and memory are predicted: what generates, how, and for which requests."""

    version: Literal[1]
    """The version of the file's format."""
    model: ModelConfig
    """The model: a published one by its name, a config, or a folder."""
    strategy: Strategy = Strategy()
    """Axes, and the memory budget with its tiers."""
    inference: Inference = Inference()
    """How requests share the device."""
    workload: GenerationWorkload = GenerationWorkload()
    """The requests."""

    @field_validator("model", mode="before")
    @classmethod
    def _published(cls, given: Any) -> Any:
        if isinstance(given, str):
            return {"config": {**to_config(shape(given)), "dtype": "bfloat16"}}
        return given


def load_generation(given: str, overrides: Sequence[str] = ()) -> GenerationRun:
    """The run that a YAML file describes, or that of a published model or a Transformers folder, with dotted overrides.

    Raises ConfigError as `load` does.
    """
    path = Path(given).expanduser()
    if path.suffix in (".yaml", ".yml"):
        return load_file(GenerationRun, path, overrides)
    model: Any = (
        {"path": str(path)} if path.is_dir() else {"config": {**to_config(shape(given)), "dtype": "bfloat16"}}
    )
    return build(GenerationRun, [(given, {"version": 1, "model": model})], overrides)
