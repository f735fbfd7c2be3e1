"""One rank's part of one global tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hyper_parallel.errors import CheckpointError
from hyper_parallel.layout import Layout

SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The element types that can be stored, with their safetensors names."""


@dataclass(frozen=True)
class Piece:
    """This rank's local tensor of a global tensor, with the global tensor's layout.

    `local` is a plain tensor on any device, of shape ``layout.local_shape(coordinate)``; `Writer.save` reads
    it, `read` fills it in place.
    """

    local: torch.Tensor
    layout: Layout


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``, as the index files write it; ``getattr(torch, name)`` is the
    inverse.
    """
    return str(dtype).removeprefix("torch.")


def check(name: str, piece: Piece, rank: int) -> None:
    """Raise CheckpointError if a piece does not match what its layout assigns to `rank`."""
    layout = piece.layout
    if layout.partial:
        axes = ", ".join(sorted(layout.partial))
        raise CheckpointError(f"{name}: its sum over {axes} has not been taken; reduce it before saving")
    expected = layout.local_shape(layout.mesh.coordinate(rank))
    if tuple(piece.local.shape) != expected:
        raise CheckpointError(
            f"{name}: rank {rank} has a local tensor of shape {tuple(piece.local.shape)}, but layout "
            f"{layout} "
            f"gives it {expected}; pass the local tensor and the layout of the same parameter"
        )
    if piece.local.dtype not in SAFETENSORS_NAMES:
        known = ", ".join(dtype_name(dtype) for dtype in SAFETENSORS_NAMES)
        raise CheckpointError(f"{name}: {dtype_name(piece.local.dtype)} cannot be stored; use one of {known}")
