"""What is alive, as somebody sees it who knows nothing of a graph or a plan."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyper_parallel.offloading.tiers import HostTier
from hyper_parallel.offloading.tiers.slots import Copy


class Observer(TorchDispatchMode):
    """After each operator, the bytes of all untyped storages that operators have seen and that are still there.

    Each is asked anew how large it is, since one may lose its memory and get it back.
    """

    looking = True
    """Of all observers: whether what operators see now is on the device."""

    def __init__(self, there: Sequence[Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._known: dict[int, Any] = {}
        self._see(there)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if Observer.looking:
            self._see(tree_leaves((args, kwargs, result)))
        return result

    def _see(self, tensors: Sequence[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                key = id(storage)
                if key not in self._known:
                    self._known[key] = weakref.ref(storage, partial(self._forget, key))
        self.peak = max(self.peak, self.alive)

    def _forget(self, key: int, _: object) -> None:
        del self._known[key]

    @property
    def alive(self) -> int:
        """Bytes now."""
        there = [reference() for reference in list(self._known.values())]
        return sum(storage.nbytes() for storage in there if storage is not None)


class OfPyTorch(Observer):
    """Sees what PyTorch's allocators gave, and not the memory of tiers, with which a processor computes in place."""

    def _see(self, tensors: Sequence[Any]) -> None:
        super()._see(
            [
                one
                for one in tensors
                if isinstance(one, Tensor) and not one.is_meta and one.untyped_storage().resizable()
            ]
        )


class UnseenHost(HostTier):
    """A host tier whose memory no observer counts as the device's. On a processor both are of one kind, and to begin an
    update on the host makes views of the tier's memory in the thread that computes."""

    def begin_work(self, what: str, slots: Sequence[int], work: Callable[[Sequence[Tensor]], None]) -> Copy:
        """As `Workplace`."""
        Observer.looking = False
        try:
            return super().begin_work(what, slots, work)
        finally:
            Observer.looking = True
