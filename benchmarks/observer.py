"""What is alive, as somebody sees it who knows nothing of a graph or a plan."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Observer(TorchDispatchMode):
    """After each operator, the bytes of all untyped storages that operators have seen and that are still there.

    Each is asked anew how large it is, since one may lose its memory and get it back.
    """

    def __init__(self, there: Sequence[Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._known: dict[int, Any] = {}
        self._see(there)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._see(tree_leaves((args, kwargs, result)))
        return result

    def _see(self, tensors: Sequence[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = id(storage)
                if key not in self._known:
                    self._known[key] = weakref.ref(storage, lambda _, key=key: self._known.pop(key))
        self.peak = max(self.peak, self.alive)

    @property
    def alive(self) -> int:
        """Bytes now."""
        there = [reference() for reference in list(self._known.values())]
        return sum(storage.nbytes() for storage in there if storage is not None)
