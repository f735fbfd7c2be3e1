"""Storages that may still be in use, or whose memory cannot be given up and taken again."""

from __future__ import annotations

import torch
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


def is_movable(storage: torch.UntypedStorage) -> bool:
    """Whether a storage's memory can be given up and taken again: it is neither shared with other processes nor lent by
    NumPy or a mapped file."""
    # Of an accelerator's memory PyTorch says that all of it may be shared.
    return storage.resizable() and not (storage.device.type == "cpu" and storage.is_shared())


def is_mapped(storage: torch.UntypedStorage) -> bool:
    """Whether a storage is a private view of a file."""
    return storage.filename is not None and not storage.is_shared()
