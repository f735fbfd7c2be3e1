"""Process groups beside the default one, messages between ranks by the key-value store, counts of begun collectives.

`torch.distributed.new_group` makes groups of ranks of one run. In a `StandaloneGroup` processes of several runs meet:
one of them serves a store, all connect to it, and each group gets its keys by a prefix, so that a group can be made
again after a loss. Tensors are on the host, and travel by gloo.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

T = TypeVar("T")


class PeerError(Exception):
    """A transfer did not end: it was too late, or the other rank is gone."""


@dataclass(frozen=True)
class ServedStore:
    """A store that this process serves for as long as it keeps this."""

    store: c10d.TCPStore
    host: str
    port: int


def serve_store(host: str) -> ServedStore:
    """Serve a store at one address of this machine, at a free port. Raises OSError."""
    listener = socket.create_server((host, 0), backlog=1024)
    taken = listener.getsockname()[1]
    store = c10d.TCPStore(
        host, taken, None, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return ServedStore(store, host, taken)


@dataclass(eq=False)
class Pending:
    """A transfer under way. Its group ends it, since a work that is kept keeps the connections open."""

    tensor: Tensor
    """What is sent, or where it comes to."""
    work: dist.Work | None


class StandaloneGroup:
    """Point-to-point transfers among `world` processes. The k-th send to a rank meets its k-th receive."""

    def __init__(self, group: dist.ProcessGroupGloo) -> None:
        self._group: dist.ProcessGroupGloo | None = group
        self._pending: set[Pending] = set()

    @classmethod
    def connect(
        cls, host: str, port: int, prefix: str, *, rank: int, world: int, seconds: float, digest: str = ""
    ) -> StandaloneGroup:
        """Meet the other ranks at a store, under a prefix that no group of it has had.

        Each rank listens on this machine's address where the store is on a loopback address, else on the interface in
        GLOO_SOCKET_IFNAME, or that of the machine's name.

        Raises PeerError when they have not all come within `seconds`, or where rank 0 has another `digest`.
        """
        ends = time.monotonic() + seconds
        try:
            store = c10d.TCPStore(host, port, None, is_master=False, timeout=timedelta(seconds=seconds))
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            loopback = _is_loopback(host)
            options._devices = [
                dist.ProcessGroupGloo.create_device(hostname=host)
                if loopback
                else dist.ProcessGroupGloo.create_default_device()
            ]
            left = max(ends - time.monotonic(), 0.001)
            options._timeout = timedelta(seconds=left)
            store.set_timeout(options._timeout)
            if rank == 0:
                store.set(f"{prefix}/digest", digest)
            group = cls(dist.ProcessGroupGloo(c10d.PrefixStore(prefix, store), rank, world, options))
            first = store.get(f"{prefix}/digest").decode()
        except RuntimeError as error:  # of the distributed package, and gloo's
            raise PeerError(f"the ranks have not met within {seconds:g} s ({_first_line(error)})") from error
        if first != digest:
            group.close()
            raise PeerError("rank 0 was given something else to exchange")
        return group

    def send(self, tensor: Tensor, to: int) -> Pending:
        """Begin to send; the tensor stays as it is until `wait`."""
        return self._begun(tensor, lambda group: group.send([tensor], to, 0))  # type: ignore[attr-defined]

    def receive(self, tensor: Tensor, sender: int) -> Pending:
        """Begin to receive into a tensor of exactly the size that is sent."""
        return self._begun(tensor, lambda group: group.recv([tensor], sender, 0))  # type: ignore[attr-defined]

    def _begun(self, tensor: Tensor, begin: Callable[[dist.ProcessGroupGloo], dist.Work]) -> Pending:
        group = self._group
        if group is None:
            raise PeerError("the group is closed")
        try:
            pending = Pending(tensor, begin(group))
        except RuntimeError as error:
            raise PeerError(_first_line(error)) from error
        self._pending.add(pending)
        return pending

    def wait(self, pending: Pending, seconds: float) -> Tensor:
        """Wait for a transfer; its tensor. Raises PeerError when it is not over within `seconds`, or the other rank is
        gone: then the group is of no more use."""
        work, pending.work = pending.work, None
        self._pending.discard(pending)
        try:
            if work is None:
                raise PeerError("the group is closed")
            work.wait(timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError as error:
            raise PeerError(_first_line(error)) from error
        finally:
            del work  # the error's traceback has this frame, and a work keeps the connections open
        return pending.tensor

    def close(self) -> None:
        """Close the connections: the other ranks' transfers end with an error. A thread that waits here goes on until
        its time is over."""
        group, self._group = self._group, None
        for pending in list(self._pending):
            pending.work = None
        self._pending.clear()
        if group is not None:
            group.abort()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _first_line(error: BaseException) -> str:
    """The error in one line, without the place in the library's source."""
    text = str(error).split("\n")[0]
    return text.split("] ", 1)[-1] if text.startswith("[/") else text


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


# Names of process groups: torch makes that of a group which its own ranks make alone of its ranks and of how many
# groups the process has. Ranks of unlike device groups have made unlike numbers.


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return what each rank of a group gives, by rank; by default of all ranks. A collective."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def level_group_counts() -> None:
    """Have every rank have made as many process groups, by groups of one rank. A collective of all ranks."""
    count = len(distributed_c10d._world.pg_names)
    for _ in range(max(gather_objects(count)) - count):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


def collectives_begun() -> int:
    """How many collectives this process has begun, over all its process groups; 0 where there is none.

    Ranks of one program begin the same ones in the same order, so that of ranks that wait for one another the one that
    is waited for has begun fewest. May be called from another thread.
    """
    begun = 0
    for group in list(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # a library that does not count
            begun += int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    return begun
