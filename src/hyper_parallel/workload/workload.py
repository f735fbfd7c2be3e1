"""Workload: the model, the batch and the sequence length of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hyper_parallel.errors import ConfigError, nearest
from hyper_parallel.workload.shape import LARGEST, Shape

Precision = Literal["fp32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"]
"""Precision of matrix products. `fp8` has a scale for each tensor; `mxfp8` one for each 32 elements (OCP Microscaling
Formats, 2023); `nvfp4` one for each 16 of 4 bits. Other operators of the last three are in bf16.
"""

PRECISIONS: tuple[Precision, ...] = get_args(Precision)

OPTIMIZERS = ("adamw", "muon")


@dataclass(frozen=True)
class Workload:
    """A training step. Raises ConfigError for invalid sizes."""

    shape: Shape
    batch: int
    """Sequences per step, over all devices."""
    sequence: int
    """Tokens per sequence."""
    precision: Precision = "bf16"
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        for name in ("batch", "sequence"):
            value = getattr(self, name)
            if not 1 <= value <= LARGEST:
                raise ConfigError(f"{name} must be 1 to {LARGEST:,}; got {value:,}")
        for name, known in (("precision", PRECISIONS), ("optimizer", OPTIMIZERS)):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(
                    f"{name} is one of {', '.join(known)}; got {value!r}{nearest(value, known)}"
                )

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.sequence
