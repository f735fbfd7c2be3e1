"""The link between the workers of a launcher, which have no common parent of ours: the store that they meet at."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from hyper_parallel.launch.stop import STOPS

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_STOP = "hyper_parallel/stop"
POLL_S = 1.0
"""How often a worker looks for another one's request."""


class StoreLink:
    """The link of a launcher's worker: a request to stop that reaches one of them reaches all.

    The store is asked on a thread of its own, since an answer never comes while the process that holds it is stopped,
    and over a connection of its own, since one that waits is not shared.
    """

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._orders: queue.SimpleQueue[str] = queue.SimpleQueue()

    def connect(self, store: Store) -> None:
        """Begin to exchange requests through the store."""
        own = store.clone()  # type: ignore[attr-defined]
        threading.Thread(target=self._exchange, args=(own,), name="store-link", daemon=True).start()

    def sources(self) -> list[Connection]:
        return []

    def orders(self) -> list[str]:
        found: list[str] = []
        while not self._orders.empty():
            found.append(self._orders.get())
        return found

    def tell(self, message: Mapping[str, Any]) -> None:
        # A request to save needs no link: the step's reduction carries it.
        if message["event"] == "signal" and message["number"] in STOPS:
            self._asked.set()

    def _exchange(self, store: Store) -> None:
        try:
            while not self._asked.wait(POLL_S):
                if store.check([_STOP]):
                    self._orders.put("stop")
                    return
            store.set(_STOP, "1")
        except RuntimeError:  # who holds the store has gone
            return
