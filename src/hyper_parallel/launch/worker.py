"""One worker: its place, device and process group, and the run of the target function in it."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hyper_parallel.config.launch import Launched
from hyper_parallel.errors import LaunchError
from hyper_parallel.launch import admission, rendezvous, stop
from hyper_parallel.launch.heartbeat import pulse
from hyper_parallel.launch.rendezvous import WorkerPlace, wrong_world
from hyper_parallel.launch.worker_failure import Failure
from hyper_parallel.proc import cores

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

    from hyper_parallel.compat import Backend

log = logging.getLogger(__name__)

MEET_S = 600.0
"""Seconds that workers wait for one another at the store, if `launch.timeout` is not set."""
LIMIT = timedelta(days=20)
"""Practically unlimited timeout for a collective: the watchdog ends a run that hangs, and recognizes a suspended one.
"""

Target = Callable[[Any, "Worker"], Any]


@dataclass(frozen=True)
class Worker:
    """A worker's place in the run: 0 ≤ rank < world, 0 ≤ local_rank < local_world, and its device.

    The default process group of `torch.distributed` spans the world, also when that is 1: a device mesh
    needs it.
    """

    rank: int
    local_rank: int
    world: int
    local_world: int
    device: torch.device
    backend: Backend
    calls: socket.socket | None = None
    """In a group that a controller drives: where its instruction lists arrive (`launch.roles`)."""


def find_target(name: str) -> Target:
    """The function that ``package.module:function`` names. Raises LaunchError when there is none."""
    module_name, colon, function_name = name.partition(":")
    if not colon:
        raise LaunchError(f"a target is written package.module:function; got {name!r}")
    function: Target | None = getattr(importlib.import_module(module_name), function_name, None)
    if function is None:
        raise LaunchError(f"the module {module_name!r} has no function {function_name!r}")
    return function


def work(
    place: WorkerPlace,
    config: Launched,
    target: str,
    report: Callable[[Failure, Store | None], None],
    listener: socket.socket | None = None,
    connected: Callable[[Store], None] = lambda store: None,
    calls: socket.socket | None = None,
) -> int:
    """Run the target as this worker; the exit code. `report` is called once when it fails, `connected` once the
    store is reached; `calls` is what `Worker` says.

    The process computes with `launch.threads` threads (left out: this machine's cores divided by its
    workers).
    """
    store: Store | None = None
    timeout = timedelta(seconds=config.launch.timeout or MEET_S)

    try:
        with stop.interruptible():
            worker = _prepared(place, config, calls)
            store = rendezvous.open_store(place, timeout, listener)
            store = _admitted(place, config, timeout, store)
            connected(store)
            _begin(place, worker, store)
            function = find_target(target)
        with pulse.operation("running", patient=False):
            function(config, worker)
        _leave_together(store, place, timeout)
        stop.disarm()
        return 0
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        log.exception("failed", extra={"terminal": False})  # the supervisor prints it there, once
        stop.disarm()
        if stop.interrupted():
            return 130
        failure = Failure.of(place.rank, error)
        report(failure, store)
        return failure.exit_code


def join(place: WorkerPlace, config: Launched, listener: socket.socket | None = None) -> Worker:
    """Meet the other workers, as `work` does, in a process whose owner runs it: an actor of another library."""
    timeout = timedelta(seconds=config.launch.timeout or MEET_S)
    worker = _prepared(place, config, None)
    store = _admitted(place, config, timeout, rendezvous.open_store(place, timeout, listener))
    _begin(place, worker, store)
    return worker


def _prepared(place: WorkerPlace, config: Launched, calls: socket.socket | None) -> Worker:
    """This process's threads, device and environment."""
    threads = config.launch.threads or max(1, cores() // place.local_world)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for what the target starts; torch is loaded already
    os.environ["LOCAL_WORLD_SIZE"] = str(place.local_world)  # as torchrun says it: what lies on a node
    import torch
    import torch.distributed as dist

    from hyper_parallel import compat

    if dist.is_initialized():
        raise LaunchError(
            "torch.distributed is initialised already; leave that to launch, or write your own loop "
            "around parallelize"
        )
    torch.set_num_threads(threads)
    backend = compat.backend(
        config.launch.device, workers=max(place.local_world, *(index + 1 for index in place.devices), 0)
    )
    device = backend.device(place.devices[place.local_rank] if place.devices else place.local_rank)
    backend.set_device(device)
    interface = rendezvous.interface(place)
    for variable, value in backend.environment(interface).items() if interface else ():
        os.environ.setdefault(variable, value)
    log.info(
        "rank %d of %d on %s, %d threads, %s at %s:%d",
        place.rank,
        place.world,
        device,
        threads,
        place.launcher,
        place.host,
        place.port,
    )
    if backend.name == "cpu" and place.rank == 0 and config.launch.device == "auto":
        _say_what_is_idle(place)
    return Worker(place.rank, place.local_rank, place.world, place.local_world, device, backend, calls)


def _admitted(place: WorkerPlace, config: Launched, timeout: timedelta, store: Store) -> Store:
    """The workers' shared store, once this worker has proved its membership and that it runs what the others run."""
    token = admission.token_of(config.launch)
    if place.rank == 0:
        _say_who_can_reach(place, token is not None)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = admission.admitted(store, place.rank, place.world, token, timeout, attempt)
    admission.agree(store, place, config, timeout, attempt)
    if place.launcher != "local" and (reason := wrong_world(config, place)) is not None:
        raise LaunchError(reason)
    return store


def _begin(place: WorkerPlace, worker: Worker, store: Store) -> None:
    """Make the default process group."""
    import torch.distributed as dist

    from hyper_parallel.compat.process_groups import collectives_begun

    dist.init_process_group(
        worker.backend.process_group, store=store, rank=place.rank, world_size=place.world, timeout=LIMIT
    )
    pulse.count_collectives(collectives_begun)


def _say_who_can_reach(place: WorkerPlace, has_token: bool) -> None:
    if place.world == 1 or rendezvous.is_loopback(place.host):
        return
    log.warning(
        "workers meet at %s:%d, which other machines can reach: their traffic is neither encrypted nor "
        "authenticated, so keep the network closed%s (SECURITY.md)",
        place.host,
        place.port,
        "" if has_token else ", and set launch.token so that no process of others takes a worker's place",
    )


def _say_what_is_idle(place: WorkerPlace) -> None:
    from hyper_parallel import compat

    for found in compat.accelerators():
        log.warning(
            "%d workers here but only %d %s devices: computing on the CPU; for the devices start at most as "
            "many workers (launch.workers=1 is the one-device run)",
            place.local_world,
            found.device_count(),
            found.name,
        )


def _leave_together(store: Store, place: WorkerPlace, timeout: timedelta) -> None:
    """Wait until every rank's target is done: a rank that leaves earlier would close connections, and rank 0 the store,
    that others still use.
    """
    import torch.distributed as dist

    # From here on a lost peer does no harm.
    with contextlib.suppress(RuntimeError):
        ended = store.add("hyper_parallel/ended", 1)
        deadline = time.monotonic() + timeout.total_seconds()
        while ended < place.world and time.monotonic() < deadline:
            time.sleep(0.01)
            ended = store.add("hyper_parallel/ended", 0)
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
