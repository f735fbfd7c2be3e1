"""`model` of a file of generation: as in a run file, or a published model by its name."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from hyper_parallel.config.model import ModelConfig
from hyper_parallel.workload.published import shape
from hyper_parallel.workload.to_config import to_config


def published(name: str) -> dict[str, Any]:
    """The section of a published model. Raises ConfigError for a name that is not known."""
    return {"config": {**to_config(shape(name)), "dtype": "bfloat16"}}


PredictedModel = Annotated[
    ModelConfig, BeforeValidator(lambda given: published(given) if isinstance(given, str) else given)
]
"""A published model by its name, a config, or a folder."""
