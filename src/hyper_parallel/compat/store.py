"""The process group's key-value store: messages between ranks that are not tensors."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

PATIENCE = timedelta(days=1)
"""A rank that fails ends the run, and with it those that wait for it."""


def leave_word(key: str, text: str) -> None:
    """Leave a text for other ranks under a key; nobody has to wait for it."""
    dist.distributed_c10d._get_default_store().set(key, text)


def word_left(key: str, seconds: float) -> str | None:
    """The text that a rank stores under a key within `seconds`; None after a timeout or when the store is gone."""
    store = dist.distributed_c10d._get_default_store()
    try:
        store.wait([key], timedelta(seconds=seconds))
        return str(store.get(key).decode())
    except RuntimeError:  # of the distributed package: time is over, or who holds the store has gone
        return None


def broadcast_text(key: str, text: str | None) -> str:
    """The text that one rank gives under a key, on every rank; the others give None and wait, however long it takes.

    A collective without the time limit of one: the rank may be at work for longer than a collective may take.
    """
    if dist.get_world_size() == 1:
        assert text is not None
        return text
    store = dist.distributed_c10d._get_default_store()
    if text is not None:
        store.set(key, text)
        return text
    store.wait([key], PATIENCE)
    return str(store.get(key).decode())


def taken_word(key: str) -> str | None:
    """The text that a rank has stored under a key, which is removed; None where there is none yet."""
    store = dist.distributed_c10d._get_default_store()
    if not store.check([key]):
        return None
    text = str(store.get(key).decode())
    store.delete_key(key)
    return text


def is_left(key: str) -> bool:
    """Whether a rank has stored a text under a key."""
    return bool(dist.distributed_c10d._get_default_store().check([key]))


Address = tuple[str, int]
"""Host and port."""


def address() -> Address | None:
    """Where the store of this process's group is served; None where it is in this process alone."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, c10d.TCPStore) else None


def connected(store: Address | None, prefix: str, timeout: timedelta) -> c10d.Store:
    """A connection of another process to the store at an address, for keys with a prefix. Without an address a store
    of this process alone."""
    if store is None:
        return c10d.HashStore()
    return c10d.PrefixStore(prefix, c10d.TCPStore(*store, is_master=False, timeout=timeout))
