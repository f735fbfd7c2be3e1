"""Live bytes: a counter of the storages that operators see and that are still alive, as a dispatch mode."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.compat.dispatch import TorchDispatchMode
from hyper_parallel.compat.pytree import leaves_of


class LiveBytes(TorchDispatchMode):
    """Inside, `peak` is the most bytes on `device` that were alive at once, besides those of `known` tensors and what
    `besides()` says."""

    def __init__(
        self, device: torch.device, known: Iterable[Tensor], besides: Callable[[], int] = int
    ) -> None:
        super().__init__()
        self.peak = 0
        self._device, self._besides = device.type, besides
        self._known = list(known)  # kept alive, so that no other storage has the identity of one
        self._seen: dict[int, Any] = {id(one.untyped_storage()): None for one in self._known}
        self._bytes = 0

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        # Each callback holds the counter: without it, all that the counter holds is freed now.
        self._seen.clear()
        self._known.clear()
        self._besides = int

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in leaves_of((args, kwargs, result)):
            if isinstance(leaf, Tensor) and leaf.device.type == self._device:
                self._see(leaf)
        self.peak = max(self.peak, self._bytes - self._besides())
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._seen:
            count = storage.nbytes()
            self._bytes += count
            self._seen[key] = weakref.ref(storage, lambda _: self._gone(key, count))

    def _gone(self, key: int, count: int) -> None:
        del self._seen[key]
        self._bytes -= count
