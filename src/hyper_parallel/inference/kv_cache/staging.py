"""Staging buffers: keys and values of one layer of one request in one piece, shared by all layers.

There are two of each, so that one can be filled while attention reads the other. A buffer is made when it is first
needed, since only then the sizes are known, and grows to the largest layer. The unpacked values of int8 pages have
buffers like these, one of each, since attention is over when the next context is unpacked.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Staging:
    """Two buffers for keys and two for values, each of at least `rows` tokens."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.side = 0
        """The buffer that attention read last: the other one may be being filled."""
        self._buffers: dict[tuple[int, int], Tensor] = {}

    @property
    def bytes(self) -> int:
        """Of the buffers that were made."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def clear(self) -> None:
        """Give up the buffers."""
        self._buffers.clear()

    def view(self, which: int, like: Tensor, rows: int, side: int | None = None) -> Tensor:
        """Room for `rows` tokens of keys (`which` 0) or values (1) as a store `like` [·, H, D] has them, in one of the
        two buffers, by default the one that was read last. What was there is overwritten."""
        side = self.side if side is None else side
        wanted = max(rows, self.rows) * like[0].nbytes if len(like) else 0
        buffer = self._buffers.get((which, side))
        if buffer is None or buffer.numel() < wanted:
            self._buffers.pop((which, side), None)
            del buffer
            buffer = torch.empty(wanted, dtype=torch.uint8, device=like.device)
            self._buffers[which, side] = buffer
        return buffer[: rows * like[0].nbytes].view(like.dtype).view(rows, *like.shape[1:])
