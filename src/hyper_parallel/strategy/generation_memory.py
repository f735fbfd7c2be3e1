"""`memory` section of generation: the budget of the device, and the tiers for what does not fit.

The keys are those of training's section; what concerns gradients and optimizer state is refused by name.
"""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from hyper_parallel.strategy.memory import Bytes, Memory
from hyper_parallel.strategy.section import Section

TIERS = ("host", "pool", "flash")
"""The tiers, the fastest first."""


class GenerationMemory(Section):
    """Memory of generation: the device's budget and the tiers."""

    device: Bytes | Literal["auto"] | None = None
    """Memory budget: the bytes of weights, KV cache and everything that a pass computes that may be on the device at
    once. `auto`: what is free on the device. Weights that do not fit are read from `host`, `pool` or `flash` in each
    pass.
    """
    host: Bytes | None = None
    """Host memory for what is not on the device."""
    pool: Bytes | None = None
    """Memory that all ranks of a machine or supernode share, for what is not on the device."""
    flash: str | None = None
    """A folder on a fast disk for what fits in neither. The files in it are removed when the run ends."""

    @classmethod
    def _hint(cls, key: str, known: set[str]) -> str:
        if key in Memory.model_fields:
            return (
                f"'memory.{key}' is for training, and generation has nothing that it applies to; leave it out (the "
                f"keys here are device, {', '.join(TIERS)})"
            )
        return super()._hint(key, known)

    @model_validator(mode="after")
    def _has_budget(self) -> GenerationMemory:
        elsewhere = [name for name in TIERS if getattr(self, name) is not None]
        if self.device is None and elsewhere:
            raise ValueError(
                f"'{elsewhere[0]}' is where things go that do not fit on the device; set device to what it may hold, "
                "or to auto"
            )
        return self
