"""Regathered inputs: shards are saved and gathered again in the backward pass.

The model's own linear layers save their input for the gradient of their weights. While they run, hooks on saved
tensors see what autograd keeps: where it is the gathered tensor, only the means to gather it again are kept. Layers
that share an input (q, k and v; gate and up) share one gather in the backward pass too.

Reducing what is kept by gathering again: arXiv 2205.05198, section 4.2.2 (for one axis with the sequence split).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from hyper_parallel.compat.local_tensor import each_rank
from hyper_parallel.shard.hooks import Forward, Wrapper, change_input

Gather = Callable[[torch.Tensor], torch.Tensor]


class GatheredInput:
    """What a region's products share as their input, and how autograd saves it while they run."""

    def __init__(self) -> None:
        self._saving: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    def enter(self, shard: torch.Tensor, gather: Gather, keeps: bool = False) -> torch.Tensor:
        """`gather(shard)`; unless the region `keeps` it, products that run in `saving` save the shard."""
        if keeps:
            return gather(shard)
        whole, self._saving = gather_again(shard, gather)
        return whole

    def region(self, gather: Gather, keeps: bool = False) -> Wrapper:
        """A wrapper of the module whose products share the input: what it is given is gathered."""
        change = change_input(lambda shard: self.enter(shard, gather, keeps))

        def wrapper(forward: Forward, *args: Any, **kwargs: Any) -> Any:
            try:
                return change(forward, *args, **kwargs)
            finally:
                self.leave()

        return wrapper

    def leave(self) -> None:
        """Let go of the input."""
        self._saving = contextlib.nullcontext

    def saving(self) -> AbstractContextManager[None]:
        """The context that products of the input last given run in."""
        return self._saving()

    def saved(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """A wrapper of a product."""
        with self._saving():
            return forward(*args, **kwargs)


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
        self.again, self.shape = again, like.shape
        again.want()

    def unpack(self) -> torch.Tensor:
        return self.again.take().view(self.shape)


def gather_again(
    shard: torch.Tensor, gather: Gather
) -> tuple[torch.Tensor, Callable[[], AbstractContextManager[None]]]:
    """`gather(shard)`, and a context in which autograd saves that tensor as its shard.

    Saved tensors are recognised by their storage, so that a view as a matrix counts; a transposed view does not.
    """
    whole = gather(shard)
    if not torch.is_grad_enabled() or whole is shard:
        return whole, contextlib.nullcontext
    again = _Again(shard, gather)
    storage, count, alive = _storage(whole), whole.numel(), weakref.ref(whole)

    def pack(saved: torch.Tensor) -> Any:
        # A storage is known by its address, which says nothing any more once the tensor is gone.
        same = alive() is not None and _storage(saved) == storage
        return _Saved(again, saved) if same and saved.numel() == count and saved.is_contiguous() else saved

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
