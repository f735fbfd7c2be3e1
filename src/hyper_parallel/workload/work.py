"""Work: what a kernel computes and moves, which is all that a device needs to say how long it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WorkKind = Literal["matmul", "attention", "elementwise", "reduce", "copy", "view", "optimizer", "host"]
"""What sort of kernel it is: sorts differ in the engine they run on and in how much of its peak they reach."""


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel's arithmetic and traffic. FLOPs are floating-point operations, bytes are of the device's memory."""

    kind: WorkKind
    flops: float = 0.0
    """On the matrix engine."""
    vector_flops: float = 0.0
    """On the vector engine."""
    read: float = 0.0
    """Bytes."""
    written: float = 0.0
    """Bytes."""
    dtype: str = "float32"
    """Of the operands, without `torch.`."""
    shape: tuple[int, ...] = ()
    """(batch, m, n, k) of a matmul; empty where the kind has none."""
