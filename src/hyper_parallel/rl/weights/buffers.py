"""A pool of host buffers: first touching fresh memory costs several times what copying into it does."""

from __future__ import annotations

import torch
from torch import Tensor


class BufferPool:
    """Buffers that are taken and given back. It has as many as were ever taken at the same time."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._taken: dict[int, Tensor] = {}
        """By address."""

    def __len__(self) -> int:
        return len(self._free) + len(self._taken)

    def take(self, size: int) -> Tensor:
        """uint8[size], uninitialised: of the smallest free buffer that is large enough, or of a new one."""
        self._free.sort(key=lambda one: one.numel())
        at = next((at for at, one in enumerate(self._free) if one.numel() >= size), -1)
        whole = self._free.pop(at) if self._free else None
        if whole is None or whole.numel() < size:
            whole = torch.empty(size, dtype=torch.uint8)  # in the place of the largest, which was too small
        self._taken[whole.data_ptr()] = whole
        return whole[:size]

    def give_back(self, buffer: Tensor) -> None:
        """Let a buffer be used again; `buffer` as `take` gave it."""
        self._free.append(self._taken.pop(buffer.data_ptr()))
