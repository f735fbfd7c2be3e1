"""The process group's key-value store: messages between ranks that are not tensors."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

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


def broadcast_from_rank_0(key: str, text: str | None) -> str:
    """The text that rank 0 gives under a key, on every rank; the others give None and wait, however long it takes.

    A collective without the time limit of one: rank 0 may be at work for longer than a collective may take.
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
