"""Memory of tensors: paged-out parameters, storages that are alive or can be moved.

Under a memory budget a parameter's storage may have no bytes between steps. Whoever reads or writes values outside of a
step's graph (a checkpoint, an evaluation, the first values) does so inside `present`, which costs nothing where the
memory is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Lend = Callable[[torch.Tensor, bool], AbstractContextManager[None]]
"""(the tensor, whether what is written to it is to last): inside, its memory and values are there."""
Settle = Callable[[str, torch.Tensor], None]
"""(name of a state input, the tensor that has its values now)."""

_keepers: dict[int, tuple[torch.Tensor, Lend]] = {}
"""Address of a storage to a tensor in it, which keeps it alive, and to who lends it."""
_lent: dict[int, int] = {}
"""Address of a storage to how many borrow it now."""
_settle: ContextVar[Settle | None] = ContextVar("settle", default=None)


def keep(tensor: torch.Tensor, lend: Lend) -> None:
    """From now on `present` asks `lend` for what lies in this tensor's storage."""
    _keepers[_address(tensor)] = (tensor, lend)


def forget(tensor: torch.Tensor) -> None:
    """The tensor's memory is there for good."""
    _keepers.pop(_address(tensor), None)


@contextlib.contextmanager
def present(*tensors: torch.Tensor | None, changed: bool = False) -> Iterator[None]:
    """Inside, the memory and the values of these tensors are there. `changed`: what is written to them is to last."""
    with contextlib.ExitStack() as stack:
        for tensor in tensors if _keepers else ():
            address = 0 if tensor is None else _address(tensor)
            if address not in _keepers:
                continue
            if address not in _lent:
                known, lend = _keepers[address]
                stack.enter_context(lend(known, changed))
            assert not changed or address not in _lent, "what is only looked at is written to"
            _lent[address] = _lent.get(address, 0) + 1
            stack.callback(_returned, address)
        yield


@contextlib.contextmanager
def settling(settle: Settle) -> Iterator[None]:
    """Inside, state is brought to where it rests as soon as it has values, tensor by tensor."""
    token = _settle.set(settle)
    try:
        yield
    finally:
        _settle.reset(token)


def hollow(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; without its memory until it is `filled`, where state is being settled."""
    if _settle.get() is not None:
        tensor.untyped_storage().resize_(0)
    return tensor


@contextlib.contextmanager
def filled(name: str, tensor: torch.Tensor) -> Iterator[None]:
    """Inside, a state input is given its first values; then it goes to where it rests."""
    settle = _settle.get()
    if settle is not None and not tensor.untyped_storage().nbytes():
        count = tensor.storage_offset() + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        tensor.untyped_storage().resize_(int((count + 1) * tensor.element_size() if tensor.numel() else 0))
    yield
    if settle is not None:
        settle(name, tensor)


def _returned(address: int) -> None:
    _lent[address] -= 1
    if not _lent[address]:
        del _lent[address]


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


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
