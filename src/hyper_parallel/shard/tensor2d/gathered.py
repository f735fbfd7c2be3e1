"""Gathered inputs that the backward pass does not keep: their shards are saved, and gathered once more.

The model's own linear layers save their input for the gradient of their weights. While they run, hooks on saved
tensors see what autograd keeps: where it is the gathered tensor, only the means to gather it again are kept. Layers
that share an input (q, k and v; gate and up) share one gather in the backward pass too.

Reducing what is kept by gathering again: arXiv 2205.05198, section 4.2.2 (for one axis with the sequence split).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from hyper_parallel.compat.local_tensor import each_rank

Gather = Callable[[torch.Tensor], torch.Tensor]


class _Again:
    """One gathered tensor: what it was gathered from, and how often autograd wants it."""

    def __init__(self, shard: torch.Tensor, gather: Gather) -> None:
        self.shard, self.gather = shard.detach(), gather
        self.wanted = self.left = 0
        self.made: torch.Tensor | None = None

    def want(self) -> None:
        self.wanted += 1
        self.left += 1

    def take(self) -> torch.Tensor:
        if self.made is None:
            with torch.no_grad():
                self.made = self.gather(self.shard)
        made = self.made
        self.left -= 1
        if self.left == 0:  # the last one frees it; a second backward pass starts over
            self.made, self.left = None, self.wanted
        return made


class _Saved:
    """A view of the gathered tensor that autograd saved."""

    def __init__(self, again: _Again, like: torch.Tensor) -> None:
        self.again = again
        self.shape, self.strides, self.offset = like.shape, like.stride(), like.storage_offset()
        again.want()

    def unpack(self) -> torch.Tensor:
        made = self.again.take()
        if made.shape == self.shape:
            return made
        return made.reshape(self.shape)


def gather_again(
    shard: torch.Tensor, gather: Gather
) -> tuple[torch.Tensor, Callable[[], AbstractContextManager[None]]]:
    """`gather(shard)`, and a context in which autograd saves that tensor as its shard.

    Saved tensors of the same storage are told by it, so that a view as a matrix counts; a transposed one does not.
    """
    whole = gather(shard)
    if not torch.is_grad_enabled() or whole is shard:
        return whole, contextlib.nullcontext
    again = _Again(shard, gather)
    storage = _storage(whole)

    def pack(saved: torch.Tensor) -> Any:
        same = _storage(saved) == storage and saved.numel() == whole.numel() and saved.is_contiguous()
        return _Saved(again, saved) if same else saved

    def unpack(packed: Any) -> torch.Tensor:
        return packed.unpack() if isinstance(packed, _Saved) else packed

    @contextlib.contextmanager
    def saving() -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    return whole, saving


def _storage(tensor: torch.Tensor) -> int:
    """What tells whether two tensors lie in the same memory; that of one rank where several are simulated."""
    mine = next(iter(each_rank(tensor).values()))
    return int(mine.untyped_storage()._cdata)
