"""A Transformers config as a Shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_parallel.workload.shape import Shape


def of_config(config: Mapping[str, Any], name: str = "") -> Shape:
    """The shape that a config describes; what `Shape.of_config` says."""
    raise NotImplementedError
