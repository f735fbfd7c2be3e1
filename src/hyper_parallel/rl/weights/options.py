"""Settings of a weight transfer, the same on both sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hyper_parallel.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TransferOptions:
    """How weights travel."""

    dtype: Literal["bfloat16"] | None = None
    """Round floating-point weights to this on their way; None sends what the narrower side stores."""
    delta: bool = False
    """Send only the elements whose bits have changed since the last version. Both sides keep a copy of that version."""
    bucket_bytes: int = 32 * 2**20
    """The most bytes of one message, before delta encoding."""

    def __post_init__(self) -> None:
        if self.dtype not in (None, "bfloat16"):
            raise ConfigError(f"weights cannot travel as {self.dtype!r}; use bfloat16, or leave dtype out")
        if self.bucket_bytes < 8:
            raise ConfigError(f"bucket_bytes is {self.bucket_bytes}; one element needs up to 8 bytes")
