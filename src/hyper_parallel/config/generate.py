"""Settings of `hyper-parallel generate`: a file's sections, or overrides alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from hyper_parallel.config.inference import Inference
from hyper_parallel.config.load import build
from hyper_parallel.strategy.section import Section


class GenerateConfig(Section):
    """What `hyper-parallel generate` is told beside the model and the prompts."""

    reserved: ClassVar = {"strategy": "generation runs on one device, without memory tiers"}

    version: Literal[1] = 1
    """Version of the format."""
    inference: Inference = Inference()
    """How answers are drawn, and how requests share the device."""


def load_generate(overrides: Sequence[str] = ()) -> GenerateConfig:
    """Settings with overrides such as ``"inference.max_tokens=40"``. Raises ConfigError as `load` does."""
    return build(GenerateConfig, [("generate", {"version": 1})], overrides)
