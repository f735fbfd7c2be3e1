"""Rendezvous of the workers: addresses, ports, and network interfaces.

PyTorch's own store listens on every interface. Here rank 0's store gets a bound socket: on loopback if all workers are
on one machine, else on the stated address. The socket is bound before any worker is started and is passed on open, so
that no other process can take the port in between.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import struct
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

from hyper_parallel.errors import LaunchError
from hyper_parallel.launch.launcher_env import WorkerPlace

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_SIOCGIFADDR = 0x8915  # netdevice(7)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on `host`:`port`; port 0 selects a free one.

    Raises LaunchError if the port is in use, if none is free, or if the address is not this machine's.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((str(address[0]), port), family=family, backlog=1024)
    except OSError as error:
        raise LaunchError(_why_not(host, port, error)) from error


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE and port == 0:
        return f"there is no free port on {host}; close programs that hold connections, or state a port"
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is taken by another program; set launch.rendezvous to another port "
            "(on one machine port 0 picks a free one)"
        )
    if isinstance(error, socket.gaierror):
        return f"the host {host!r} of launch.rendezvous has no address: {error.strerror}"
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"{host} of launch.rendezvous is no address of this machine, the first one (launch.node_rank=0); "
            "state one of its addresses, or give this machine its own launch.node_rank"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"this user may not listen on port {port}; set launch.rendezvous to a port above 1023"
    return f"cannot listen on {host}:{port}: {error.strerror}; set launch.rendezvous to another address"


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine only."""
    with contextlib.suppress(OSError):
        return all(
            ipaddress.ip_address(str(found[4][0]).partition("%")[0]).is_loopback
            for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        )
    return False


def interface(place: WorkerPlace) -> str | None:
    """The network interface for the workers' own connections; None leaves the choice to the library.

    Loopback when all workers are on this machine; otherwise the one through which the meeting point is
    reached.
    """
    names = [name for _, name in socket.if_nameindex()]
    if place.one_machine:
        return next((name for name in names if name.startswith("lo")), None)
    if not sys.platform.startswith("linux"):
        return None
    address = _own_address(place.host)
    if address is None or is_loopback(address):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def _own_address(host: str) -> str | None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: a datagram socket only chooses its route
        return str(probe.getsockname()[0])
    return None


def open_store(place: WorkerPlace, timeout: timedelta, listener: socket.socket | None) -> Store:
    """The key-value store for the process group; rank 0 serves it, on `listener` if given.

    Raises LaunchError as `listen` does; torch.distributed.DistError when the store is not reached in time.
    """
    from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

    if place.world == 1 and place.launcher == "local":
        return HashStore()
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and place.launcher == "torchrun"
    holds = place.rank == 0 and not agent
    if holds and listener is None:
        # A name of this machine may mean loopback here and another address to the other machines.
        host = "0.0.0.0" if is_loopback(place.host) and not place.one_machine else place.host
        listener = listen(host, place.port)
    return TCPStore(
        place.host,
        place.port,
        place.world,
        is_master=holds,
        timeout=timeout,
        master_listen_fd=listener.detach() if holds and listener is not None else None,
    )
