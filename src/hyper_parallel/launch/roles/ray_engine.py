"""Groups as Ray actors, on one machine or several.

Ray schedules the workers (a placement group for each group), starts them, and reports those that end; calls, answers
and deadlines are those of `call_queue`. Ray never reports a process that is stopped or hangs, and it waits without end
for resources that the cluster does not have: deadlines find the former, and the latter is refused before it begins.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.config.launch import RoleLaunch
from hyper_parallel.errors import LaunchError
from hyper_parallel.launch.failure import Failure, one_line
from hyper_parallel.launch.rendezvous import WorkerPlace
from hyper_parallel.launch.roles.protocol import Future
from hyper_parallel.launch.roles.queued_group import QueuedGroup, QueueEngine
from hyper_parallel.launch.roles.ray_cluster import RayWorker, authenticate, connect, kill_process, load_ray

PLACE_S = 30.0
"""Seconds that Ray has to reserve free resources."""
PROBE_S = 0.5
"""Seconds between questions to workers that execute a list."""
SILENT_S = 1.5
"""Seconds without an answer to such a question after which a process counts as silent."""
_PATIENCE_S = 0.5


class _Actors:
    """The workers of a group between two restarts."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self.actors = list(actors)
        self.processes: list[tuple[str, str, int]] = []
        """Node, its address and process id, by rank."""
        self.running = set(range(len(actors)))
        self.asked: dict[int, float] = {}
        """When a rank was asked for its position, until it answers."""
        self.probe_at = 0.0


class RayGroup(QueuedGroup):
    """A group of Ray actors (`interface.Group`)."""

    def __init__(
        self, engine: RayEngine, config: RoleLaunch, placement: Any, needs: dict[str, float]
    ) -> None:
        super().__init__(engine, config, exact=False)
        self.placement, self.needs = placement, needs
        self._actors: _Actors | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids by rank, each on its own node; empty until the processes are there."""
        actors = self._actors
        return [pid for _, _, pid in actors.processes] if actors is not None else []

    def _situation(self, rank: int) -> str:
        actors = self._actors
        if actors is None:
            return ""
        where = f" on {actors.processes[rank][1]}" if actors.processes else ""
        asked = actors.asked.get(rank)
        if asked is not None and time.monotonic() - asked > SILENT_S:
            return f"its process{where} is silent: suspended, or its machine is gone"
        return ""


class RayEngine(QueueEngine[RayGroup]):
    """Starts groups as Ray actors (`interface.Engine`)."""

    def __init__(self, address: str | None = None, *, cpus: int | None = None) -> None:
        """Join the Ray cluster at `address` (host:port), or start one on this machine that ends with this process, with
        `cpus` processors (None: this machine's cores).

        Raises LaunchError when Ray is not installed or cannot be reached.
        """
        super().__init__()
        authenticate(address)
        self._ray = load_ray()
        self._connected = connect(self._ray, address, cpus)
        # Ray's threads put into it and must not wait for the engine's lock, whose holder may wait for Ray.
        self._arrived: queue.SimpleQueue[tuple[RayGroup, _Actors, int, str, Any] | None] = queue.SimpleQueue()
        self._actor = self._ray.remote(concurrency_groups={"position": 1, "watch": 1})(RayWorker)
        self._thread.start()

    def start(self, config: RoleLaunch, *, timeout_s: float) -> RayGroup:
        """Reserve the group's resources and start its workers.

        Raises LaunchError when the cluster does not have the resources, or they are not free.
        """
        self._admit(config.name)
        if config.devices:
            raise LaunchError(
                f"group {config.name!r} names its 'devices', which Ray chooses; leave them out, or use the local engine"
            )
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        needs = needs_of(config, nodes)
        world = config.effective_strategy.world
        check_capacity(config.name, world, needs, nodes, self._ray.available_resources())
        placement = self._ray.util.placement_group([needs] * world, strategy="PACK")
        if not placement.wait(PLACE_S):
            self._ray.util.remove_placement_group(placement)
            raise LaunchError(
                f"group {config.name!r}: Ray did not reserve {world} × {_words(needs)} within {PLACE_S:g} s; end other "
                "jobs of the cluster, or ask for less"
            )
        return self._register(RayGroup(self, config, placement, needs), timeout_s)

    def begin(self, group: RayGroup, timeout_s: float) -> Future:
        """Start the workers of a group that has none."""
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        needs = dict(group.needs)
        made = _Actors(
            [
                self._actor.options(
                    num_cpus=needs.get("CPU", 0),
                    num_gpus=needs.get("GPU", 0),
                    resources={name: need for name, need in needs.items() if name not in ("CPU", "GPU")},
                    max_restarts=0,
                    max_task_retries=0,
                    name=f"{group.name}-{rank}-{secrets.token_hex(4)}",
                    scheduling_strategy=strategy(group.placement, placement_group_bundle_index=rank),
                ).remote()
                for rank in range(group.size)
            ]
        )
        with self.noticed():
            group._actors = made
            group.ready = group._queue.begin(timeout_s)
        for rank, actor in enumerate(made.actors):
            watch = actor.watch.options(concurrency_group="watch").remote()
            self._follow(group, made, rank, "watch", watch)
        threading.Thread(
            target=self._assemble, args=(group, made, timeout_s), name=f"start {group.name}", daemon=True
        ).start()
        return group.ready

    def kill(self, group: RayGroup, why: str) -> None:
        """Kill a group's workers, and fail its calls."""
        with self.noticed():
            self._kill(group)
            group._queue.stop(why)
            group._actors = None

    def close(self) -> None:
        """Kill all workers, give their resources back, and leave the cluster, or end it if this engine started it."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        self._wake()
        for group in self._groups.values():
            self.kill(group, "the engine was closed")
            with contextlib.suppress(Exception):  # a cluster that is gone holds nothing
                self._ray.util.remove_placement_group(group.placement)
        self._thread.join(5.0)
        if self._connected:
            self._ray.shutdown()

    def _assemble(self, group: RayGroup, made: _Actors, timeout_s: float) -> None:
        """The workers of a group meet. On a thread of its own, since it waits for Ray."""
        try:
            processes = self._ray.get([one.process.remote() for one in made.actors], timeout=timeout_s)
            made.processes = processes
            addresses = [address for _, address, _ in processes]
            host = "127.0.0.1" if len(set(addresses)) == 1 else addresses[0]
            port = (
                self._ray.get(made.actors[0].listen.remote(host), timeout=timeout_s) if group.size > 1 else 0
            )
            config = _with_token(group.config, len(set(addresses)) > 1)
            text = config.model_dump_json(context={"secrets": True})
            isolated = any(name != "CPU" for name in group.needs)
            for rank, actor in enumerate(made.actors):
                place = _place(rank, addresses, host, port, isolated)
                self._follow(
                    group, made, rank, "message", actor.begin.remote(place, text, str(group.log(rank)))
                )
        except Exception as error:  # a deadline of `ready` says so too, if it comes first
            self._arrive(group, made, 0, "watch", error)

    def _follow(self, group: RayGroup, made: _Actors, rank: int, kind: str, reference: Any) -> None:
        """Have the engine's thread told when a reference has its value, or has failed."""

        def arrived(future: Any) -> None:
            error = future.exception()
            self._arrive(group, made, rank, kind, error if error is not None else future.result())

        reference.future().add_done_callback(arrived)

    def _arrive(self, group: RayGroup, made: _Actors, rank: int, kind: str, value: Any) -> None:
        self._arrived.put((group, made, rank, kind, value))

    def _kill(self, group: RayGroup) -> None:
        made = group._actors
        if made is None:
            return
        own = self._ray.get_runtime_context().get_node_id()
        affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        for rank, actor in enumerate(made.actors):
            if rank in made.running and made.processes:
                node, _, pid = made.processes[rank]
                if node == own:
                    kill_process(pid)
                else:
                    killer = self._ray.remote(num_cpus=0, max_retries=0)(kill_process)
                    killer.options(scheduling_strategy=affinity(node, soft=False)).remote(pid)
            with contextlib.suppress(Exception):  # it has ended
                self._ray.kill(actor, no_restart=True)
        made.running.clear()

    # The engine's thread.

    def _wake(self) -> None:
        self._arrived.put(None)

    def _serve(self) -> None:
        due = time.monotonic()
        while not self._closed:
            try:
                arrived = self._arrived.get(timeout=max(0.001, due - time.monotonic()))
            except queue.Empty:
                arrived = None
            due = self._turn(due, arrived)

    def _turn(self, due: float, arrived: tuple[RayGroup, _Actors, int, str, Any] | None) -> float:
        """Hear and act; when the next turn should begin at the latest."""
        with self._changed:
            if self._closed:
                return due
            self._postpone(time.monotonic() - due)
            while arrived is not None:
                self._hear(*arrived)
                arrived = None if self._arrived.empty() else self._arrived.get()
            return self._act()

    def _act(self) -> float:
        active = [group for group in self._groups.values() if group._actors is not None]
        for group in active:
            if group._queue.look():
                self._kill(group)
            self._send(group)
            self._probe(group)
        return min([time.monotonic() + _PATIENCE_S, *(group._queue.next_look() for group in active)])

    def _hear(self, group: RayGroup, made: _Actors, rank: int, kind: str, value: Any) -> None:
        if made is not group._actors:
            return  # of workers before a restart
        if kind == "position":
            made.asked.pop(rank, None)
        if not isinstance(value, BaseException):
            group._queue.heard(rank, value)
        elif kind != "position":
            made.running.discard(rank)
            group._queue.ended(rank, _failure(self._ray, rank, value))

    def _send(self, group: RayGroup) -> None:
        call, made = group._queue.to_send(), group._actors
        if call is None or made is None:
            return
        for rank, actor in enumerate(made.actors):
            reference = actor.call.remote(call.number, call.lists[rank])
            self._follow(group, made, rank, "message", reference)

    def _probe(self, group: RayGroup) -> None:
        made, now = group._actors, time.monotonic()
        if made is None or not group._queue.busy or now < made.probe_at:
            return
        made.probe_at = now + PROBE_S
        for rank in sorted(made.running - made.asked.keys()):
            made.asked[rank] = now
            reference = made.actors[rank].position.options(concurrency_group="position").remote()
            self._follow(group, made, rank, "position", reference)


def needs_of(config: RoleLaunch, nodes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The resources of one worker, as Ray names them: a processor for each thread, and its device.

    Raises LaunchError for a device that no node has.
    """
    needs = {"CPU": float(config.launch.threads or 1)}
    device = config.launch.device
    if device == "cpu":
        return needs
    there = {name for node in nodes for name, amount in node.items() if amount > 0}
    found = next((name for name in (device.upper(), "GPU") if name in there), None)
    if found is None and device != "auto":
        raise LaunchError(
            f"group {config.name!r} needs devices {device!r}, and no node of the Ray cluster has any; join another "
            "cluster, or set launch.device=cpu"
        )
    return needs if found is None else {**needs, found: 1.0}


def check_capacity(
    name: str,
    workers: int,
    needs: Mapping[str, float],
    nodes: Sequence[Mapping[str, float]],
    free: Mapping[str, float],
) -> None:
    """Raise LaunchError where Ray would wait: for workers that the nodes have no room for, or that is taken.

    `needs` of one worker; `nodes`: the resources of each; `free`: of all nodes together.
    """
    room = sum(int(min(node.get(one, 0.0) // need for one, need in needs.items())) for node in nodes)
    if room < workers:
        raise LaunchError(
            f"group {name!r} needs {workers} workers with {_words(needs)} each, and the Ray cluster ({len(nodes)} "
            f"{'node' if len(nodes) == 1 else 'nodes'}) has room for {room}; ask for fewer workers or threads, or add "
            "nodes"
        )
    for one, need in needs.items():
        if free.get(one, 0.0) < workers * need:
            raise LaunchError(
                f"group {name!r} needs {workers * need:g} {one}, and {free.get(one, 0.0):g} are free in the Ray "
                "cluster; ask for less, or end other groups"
            )


def _words(needs: Mapping[str, float]) -> str:
    return " and ".join(f"{need:g} {one}" for one, need in needs.items())


def _place(rank: int, addresses: Sequence[str], host: str, port: int, isolated: bool) -> WorkerPlace:
    """A worker's place. A worker that Ray shows only its own device sees it as the first."""
    beside = [other for other, address in enumerate(addresses) if address == addresses[rank]]
    local, world = (0, 1) if isolated else (beside.index(rank), len(beside))
    return WorkerPlace("local", rank, len(addresses), local, world, host, port)


def _with_token(config: RoleLaunch, several: bool) -> RoleLaunch:
    """With a token where workers meet beyond one machine."""
    if not several or config.launch.token is not None:
        return config
    launch = config.launch.model_copy(update={"token": secrets.token_hex(32)})
    return config.model_copy(update={"launch": launch})


def _failure(ray: Any, rank: int, error: BaseException) -> Failure:
    if isinstance(error, ray.exceptions.RayActorError):
        said = one_line(str(error).partition("\n")[0])
        return Failure(rank, "died", f"ended ({type(error).__name__}: {said})", time.monotonic())
    text = f"{type(error).__name__}: {one_line(str(error))}"
    return Failure(rank, "crash", text, time.monotonic())
