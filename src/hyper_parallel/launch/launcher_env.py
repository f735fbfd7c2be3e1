"""Launcher environments: rank, world size and addresses from torchrun, Slurm and MPI variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hyper_parallel.errors import LaunchError, PlaceError

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
    if "RANK" in environ and "WORLD_SIZE" in environ:
        world = _number(environ, "WORLD_SIZE")
        local_world = _number(environ, "LOCAL_WORLD_SIZE", default=world)
        rank = _number(environ, "RANK")
        return _at(
            "torchrun",
            rank,
            world,
            _number(environ, "LOCAL_RANK", default=rank % local_world),
            local_world,
            environ,
            rendezvous,
        )
    # Within `salloc` or `sbatch`, without srun or with a single task, the command starts its workers itself.
    if "SLURM_PROCID" in environ and _number(environ, "SLURM_STEP_NUM_TASKS", default=1) > 1:
        world = _number(environ, "SLURM_STEP_NUM_TASKS")
        tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", str(world))
        return _at(
            "slurm",
            _number(environ, "SLURM_PROCID"),
            world,
            _number(environ, "SLURM_LOCALID"),
            tasks_on_node(tasks, _number(environ, "SLURM_NODEID", default=0)),
            environ,
            rendezvous,
            default=_slurm_address(environ),
        )
    for prefix in ("OMPI_COMM_WORLD", "MV2_COMM_WORLD", "PMI"):
        if f"{prefix}_RANK" in environ and _number(environ, f"{prefix}_SIZE", default=1) > 1:
            world = _number(environ, f"{prefix}_SIZE")
            rank = _number(environ, f"{prefix}_RANK")
            local_world = _number(
                environ, "MPI_LOCALNRANKS", default=_number(environ, f"{prefix}_LOCAL_SIZE", default=world)
            )
            local_rank = _number(
                environ,
                "MPI_LOCALRANKID",
                default=_number(environ, f"{prefix}_LOCAL_RANK", default=rank % local_world),
            )
            return _at("mpi", rank, world, local_rank, local_world, environ, rendezvous)
    return None


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


def _at(
    launcher: Launcher,
    rank: int,
    world: int,
    local_rank: int,
    local_world: int,
    environ: Mapping[str, str],
    rendezvous: str,
    default: tuple[str, int] | None = None,
) -> WorkerPlace:
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
