"""Storages that may still be in use: weak references to them."""

from __future__ import annotations

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class StorageReference:
    """A tensor's storage, not kept alive."""

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.bytes = storage.nbytes()
        self._reference = StorageWeakRef(storage)

    def alive(self) -> bool:
        """Whether a tensor of it, or a view of one, exists."""
        return not self._reference.expired()
