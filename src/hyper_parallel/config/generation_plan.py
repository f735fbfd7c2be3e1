"""Sections of a plan of generation, as in the file of a prediction but for the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hyper_parallel.config.generate import GenerationStrategy
from hyper_parallel.config.generation_workload import GenerationWorkload
from hyper_parallel.config.inference import PredictedInference
from hyper_parallel.config.load import build
from hyper_parallel.errors import ConfigError
from hyper_parallel.strategy.section import Section


class PlannedGeneration(Section):
    """Keys of a plan of generation."""

    version: Literal[1] = 1
    """Version of the format."""
    strategy: GenerationStrategy = GenerationStrategy()
    """Axes that are given, and budgets: `memory.device` with the tiers."""
    inference: PredictedInference = PredictedInference()
    """`batch`: requests at once; `rows` and `page`, if given, are kept."""
    workload: GenerationWorkload = GenerationWorkload()
    """The requests."""


def load_plan(overrides: Sequence[str] = ()) -> PlannedGeneration:
    """From overrides such as ``"workload.prompt_tokens=4096"``. Raises ConfigError as `load` does."""
    found = build(PlannedGeneration, [("plan", {"version": 1})], overrides)
    for axis in ("context", "pipeline", "shard", "tensor_y"):
        if getattr(found.strategy.axes, axis) > 1:
            raise ConfigError(
                f"strategy.axes.{axis}: plans of generation have tensor, expert and replicate; leave it out"
            )
    return found
