"""Rendezvous: the number of workers, each one's place (torchrun, Slurm, MPI, local), and where they meet.

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
import re
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from hyper_parallel.config.launch import LaunchConfig, Launched
from hyper_parallel.errors import ConfigError, LaunchError, PlaceError
from hyper_parallel.proc import cores

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


Launcher = Literal["local", "torchrun", "slurm", "mpi"]


@dataclass(frozen=True)
class WorkerPlace:
    """A worker's global rank, its index on its machine, and the rendezvous host:port."""

    launcher: Launcher
    rank: int
    world: int
    local_rank: int
    local_world: int
    host: str
    port: int
    devices: tuple[int, ...] = ()
    """This machine's devices for its workers, by their local ranks; empty: as many as workers, from the first."""

    @property
    def one_machine(self) -> bool:
        """Whether all the workers are on this machine."""
        return self.local_world == self.world


def split_address(address: str) -> tuple[str, int]:
    """``("10.0.0.1", 29500)`` from ``10.0.0.1:29500``; an IPv6 host stands in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def detect(environ: Mapping[str, str], rendezvous: str) -> WorkerPlace | None:
    """This process's place according to a launcher's environment, or None without a launcher.

    Supported are torchrun (and anything that sets RANK and WORLD_SIZE), Slurm's srun, Open MPI and MPICH. The
    rendezvous is MASTER_ADDR and MASTER_PORT, else `rendezvous` (`launch.rendezvous`) if it states a port. Raises
    LaunchError if there is a launcher but no rendezvous, or if a variable is not a number.
    """
    default: tuple[str, int] | None = None
    if "RANK" in environ and "WORLD_SIZE" in environ:
        launcher: Launcher = "torchrun"
        world, rank = _number(environ, "WORLD_SIZE"), _number(environ, "RANK")
        local_world = _number(environ, "LOCAL_WORLD_SIZE", default=world)
        local_rank = _number(environ, "LOCAL_RANK", default=rank % local_world)
    # Within `salloc` or `sbatch`, without srun or with a single task, the command starts its workers itself.
    elif "SLURM_PROCID" in environ and _number(environ, "SLURM_STEP_NUM_TASKS", default=1) > 1:
        launcher = "slurm"
        world, rank = _number(environ, "SLURM_STEP_NUM_TASKS"), _number(environ, "SLURM_PROCID")
        tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", str(world))
        local_world = tasks_on_node(tasks, _number(environ, "SLURM_NODEID", default=0))
        local_rank = _number(environ, "SLURM_LOCALID")
        default = _slurm_address(environ)
    else:
        launcher = "mpi"
        for prefix in ("OMPI_COMM_WORLD", "MV2_COMM_WORLD", "PMI"):
            if f"{prefix}_RANK" in environ and _number(environ, f"{prefix}_SIZE", default=1) > 1:
                break
        else:
            return None
        world, rank = _number(environ, f"{prefix}_SIZE"), _number(environ, f"{prefix}_RANK")
        known = _number(environ, f"{prefix}_LOCAL_SIZE", default=world)
        local_world = _number(environ, "MPI_LOCALNRANKS", default=known)
        known = _number(environ, f"{prefix}_LOCAL_RANK", default=rank % local_world)
        local_rank = _number(environ, "MPI_LOCALRANKID", default=known)

    for kind, index, count in (("rank", rank, world), ("local rank", local_rank, local_world)):
        if not 0 <= index < count:
            names = "RANK and WORLD_SIZE" if kind == "rank" else "LOCAL_RANK and LOCAL_WORLD_SIZE"
            raise PlaceError(
                f"{launcher} gives this process the {kind} {index} of {count}, and {kind}s are 0 to {count - 1}; "
                f"correct {names if launcher == 'torchrun' else 'its environment'} in the launch script"
            )
    stated = split_address(rendezvous)
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        address: tuple[str, int] | None = (environ["MASTER_ADDR"], _number(environ, "MASTER_PORT"))
    elif stated[1] != 0:
        address = stated
    else:
        address = default
    if address is None:
        raise LaunchError(
            f"started by {launcher} as rank {rank} of {world}, but nothing says where the workers meet; "
            "set MASTER_ADDR and MASTER_PORT, or launch.rendezvous=host:port of the first machine"
        )
    return WorkerPlace(launcher, rank, world, local_rank, local_world, *address)


def tasks_on_node(tasks_per_node: str, node: int) -> int:
    """The number of tasks on a node, from Slurm's run-length text: ``2(x3),1`` is 2, 2, 2, 1."""
    counts: list[int] = []
    for run in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", run)
        if match is None:
            raise LaunchError(f"SLURM_STEP_TASKS_PER_NODE is not understood: {tasks_per_node!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node]


def first_node(nodes: str) -> str:
    """The first host of Slurm's list: ``gpu[07-09,12],x`` gives ``gpu07``."""
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise LaunchError(f"SLURM_STEP_NODELIST is not understood: {nodes!r}")
    return match[1] + (match[2] or "") + (match[3] or "")


def _slurm_address(environ: Mapping[str, str]) -> tuple[str, int] | None:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        return None
    # Every task must name the same port, and two jobs on a node must not: the job and step numbers are all
    # that the tasks share. 20000 ports below the range from which systems hand out ephemeral ones.
    job, step = (_number(environ, key, default=0) for key in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return first_node(nodes), 10000 + (job * 7 + step) % 20000


def _number(environ: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = environ.get(key)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise LaunchError(
            f"the environment variable {key} must be a whole number; got {text!r}; the launcher sets it"
        ) from None


def workers_of(config: Launched) -> int:
    """The number over all nodes: the product of the axes; if the planner chooses these, `launch.workers`, else one for
    each accelerator of this machine (or for each core without accelerators), times the number of nodes.

    Raises ConfigError if the given axes do not divide that number.
    """
    if not config.open:
        return config.effective_strategy.world
    if config.launch.workers is not None:
        return config.launch.workers
    here, what = devices_here(config.launch)
    world, fixed = here * config.launch.nodes, config.strategy.axes.world
    if world % fixed:
        raise ConfigError(
            f"the product of the given axes, {fixed}, does not divide the {world} {what}; set "
            "launch.workers to a multiple, or leave more axes open"
        )
    return world


def devices_here(launch: LaunchConfig) -> tuple[int, str]:
    """The number of this machine's devices for workers, and their kind."""
    if launch.device != "cpu":
        # Only here, because this needs torch.
        from hyper_parallel import compat

        for found in compat.accelerators():
            if launch.device in ("auto", found.name):
                return found.device_count(), f"{found.name} devices"
    return cores(), "cores"


def wrong_world(config: Launched, place: WorkerPlace) -> str | None:
    """The error line if a launcher started another number of workers than the strategy's axes need; else None."""
    world = place.world if config.open else config.effective_strategy.world
    if place.world == world:
        return None
    return (
        f"{place.launcher} started {place.world} workers, but the strategy's axes multiply to {world} "
        f"({config.effective_strategy.product}); start {world}, or change the axes"
    )
