"""Workload: the model, the batch and the sequence length of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hyper_parallel.errors import ConfigError, nearest
from hyper_parallel.workload.adapters import Adapter
from hyper_parallel.workload.shape import LARGEST, Shape

Precision = Literal["fp32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"]
"""Precision of matrix products. `fp8` has a scale for each tensor; `mxfp8` one for each 32 elements (OCP Microscaling
Formats, 2023); `nvfp4` one for each 16 of 4 bits. Other operators of the last three are in bf16.
"""

PRECISIONS: tuple[Precision, ...] = get_args(Precision)

OPTIMIZERS = ("adamw", "adamw_8bit", "lion", "adafactor", "muon")


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
    adapter: Adapter | None = None
    """None: the whole model is trained."""
    prediction_modules: int = 0
    """Modules that each predict one token more (multi-token prediction), trained behind the last layer."""

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

        if not 0 <= self.prediction_modules <= self.shape.layers:
            raise ConfigError(
                f"modules that predict one token more are 0 to {self.shape.layers}; got {self.prediction_modules}"
            )
        if self.adapter is not None:
            if self.prediction_modules:
                raise ConfigError(
                    "adapters leave the model frozen, and modules that predict one token more are trained; give one"
                )
            if not self.adapter.features(self.shape):
                raise ConfigError(
                    f"the model {self.shape.name!r} has none of the linear layers {', '.join(self.adapter.targets)}; "
                    "give all-linear"
                )

    @property
    def trained_parameters(self) -> int:
        """Elements that the optimizer updates."""
        if self.adapter is not None:
            return self.adapter.parameters(self.shape)
        return self.shape.parameters + self.prediction_modules * self.shape.prediction_module

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.sequence
