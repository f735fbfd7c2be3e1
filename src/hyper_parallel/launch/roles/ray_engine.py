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
from hyper_parallel.launch.rendezvous import WorkerPlace
from hyper_parallel.launch.roles.call_queue import Call
from hyper_parallel.launch.roles.engine import Engine, Group
from hyper_parallel.launch.roles.protocol import Future
from hyper_parallel.launch.roles.ray_cluster import RayWorker, authenticate, connect, kill_process, load_ray
from hyper_parallel.launch.worker_failure import Failure, one_line

PLACE_S = 30.0
"""Seconds that Ray has to reserve free resources."""
PROBE_S = 0.5
"""Seconds between questions to workers that execute a list."""
SILENT_S = 1.5
"""Seconds without an answer to such a question after which a process counts as silent."""


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


class RayGroup(Group):
    """A group of Ray actors."""

    _engine: RayEngine

    def __init__(
        self, engine: RayEngine, config: RoleLaunch, placement: Any, needs: dict[str, float]
    ) -> None:
        super().__init__(engine, config, exact=False)
        self.placement, self.needs = placement, needs
        self._workers: _Actors | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids by rank, each on its own node; empty until the processes are there."""
        actors = self._workers
        return [pid for _, _, pid in actors.processes] if actors is not None else []

    def _begin(self, timeout_s: float) -> Future:
        actors = _Actors(self._engine.actors_of(self))
        with self._engine.noticed():
            self._workers = actors
            self.ready = self._queue.begin(timeout_s)
        for rank, actor in enumerate(actors.actors):
            watch = actor.watch.options(concurrency_group="watch").remote()
            self._engine.follow(self, actors, rank, "watch", watch)
        threading.Thread(
            target=self._assemble, args=(actors, timeout_s), name=f"start {self.name}", daemon=True
        ).start()
        return self.ready

    def _assemble(self, actors: _Actors, timeout_s: float) -> None:
        """Wait until the workers have met. On a separate thread, since it waits for Ray."""
        engine = self._engine
        try:
            processes = engine.ray.get([one.process.remote() for one in actors.actors], timeout=timeout_s)
            actors.processes = processes
            addresses = [address for _, address, _ in processes]
            host = "127.0.0.1" if len(set(addresses)) == 1 else addresses[0]
            port = (
                engine.ray.get(actors.actors[0].listen.remote(host), timeout=timeout_s)
                if self.size > 1
                else 0
            )
            config = _with_token(self.config, len(set(addresses)) > 1)
            text = config.model_dump_json(context={"secrets": True})
            isolated = any(name != "CPU" for name in self.needs)
            for rank, actor in enumerate(actors.actors):
                place = _place(rank, addresses, host, port, isolated)
                begun = actor.begin.remote(place, text, str(self.log(rank)))
                engine.follow(self, actors, rank, "message", begun)
        except Exception as error:  # a deadline of `ready` says so too, if it comes first
            engine.arrive(self, actors, 0, "watch", error)

    def _end(self, why: str) -> None:
        with self._engine.noticed():
            self._kill_workers()
            self._queue.stop(why)
            self._workers = None

    def _kill_workers(self) -> None:
        actors, ray = self._workers, self._engine.ray
        if actors is None:
            return
        own = ray.get_runtime_context().get_node_id()
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        for rank, actor in enumerate(actors.actors):
            if rank in actors.running and actors.processes:
                node, _, pid = actors.processes[rank]
                if node == own:
                    kill_process(pid)
                else:
                    killer = ray.remote(num_cpus=0, max_retries=0)(kill_process)
                    killer.options(scheduling_strategy=affinity(node, soft=False)).remote(pid)
            with contextlib.suppress(Exception):  # it has ended
                ray.kill(actor, no_restart=True)
        actors.running.clear()

    def _send(self, call: Call) -> None:
        assert self._workers is not None
        for rank, actor in enumerate(self._workers.actors):
            reference = actor.call.remote(call.number, call.lists[rank])
            self._engine.follow(self, self._workers, rank, "message", reference)

    def _situation(self, rank: int) -> str:
        actors = self._workers
        if actors is None:
            return ""
        where = f" on {actors.processes[rank][1]}" if actors.processes else ""
        asked = actors.asked.get(rank)
        if asked is not None and time.monotonic() - asked > SILENT_S:
            return f"its process{where} is silent: suspended, or its machine is gone"
        return ""

    def _turn(self) -> None:
        super()._turn()
        actors, now = self._workers, time.monotonic()
        if actors is None or not self._queue.busy or now < actors.probe_at:
            return
        actors.probe_at = now + PROBE_S
        for rank in sorted(actors.running - actors.asked.keys()):
            actors.asked[rank] = now
            reference = actors.actors[rank].position.options(concurrency_group="position").remote()
            self._engine.follow(self, actors, rank, "position", reference)

    def hear(self, actors: _Actors, rank: int, kind: str, value: Any) -> None:
        """Take in what a reference became. The caller has the engine's lock."""
        if actors is not self._workers:
            return  # of workers before a restart
        if kind == "position":
            actors.asked.pop(rank, None)
        if not isinstance(value, BaseException):
            self._queue.heard(rank, value)
        elif kind != "position":
            actors.running.discard(rank)
            self._queue.ended(rank, _failure(self._engine.ray, rank, value))


_Arrived = tuple[RayGroup, _Actors, int, str, Any]


class RayEngine(Engine):
    """Starts groups as Ray actors."""

    def __init__(self, address: str | None = None, *, cpus: int | None = None) -> None:
        """Join the Ray cluster at `address` (host:port), or start one on this machine that ends with this process, with
        `cpus` processors (None: this machine's cores).

        Raises LaunchError when Ray is not installed or cannot be reached.
        """
        super().__init__()
        authenticate(address)
        self.ray = load_ray()
        self._connected = connect(self.ray, address, cpus)
        # Ray's threads put into it and must not wait for the engine's lock, whose holder may wait for Ray.
        self._arrived: queue.SimpleQueue[_Arrived | None] = queue.SimpleQueue()
        self._actor = self.ray.remote(concurrency_groups={"position": 1, "watch": 1})(RayWorker)
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
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        needs = needs_of(config, nodes)
        world = config.effective_strategy.world
        check_capacity(config.name, world, needs, nodes, self.ray.available_resources())
        placement = self.ray.util.placement_group([needs] * world, strategy="PACK")
        if not placement.wait(PLACE_S):
            self.ray.util.remove_placement_group(placement)
            raise LaunchError(
                f"group {config.name!r}: Ray did not reserve {world} × {_words(needs)} within {PLACE_S:g} s; end other "
                "jobs of the cluster, or ask for less"
            )
        return self._register(RayGroup(self, config, placement, needs), timeout_s)

    def close(self) -> None:
        """Kill all workers, give their resources back, and leave the cluster, or end it if this engine started it."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        self._wake()
        for group in self._groups.values():
            assert isinstance(group, RayGroup)
            group._end("the engine was closed")
            with contextlib.suppress(Exception):  # a cluster that is gone holds nothing
                self.ray.util.remove_placement_group(group.placement)
        self._thread.join(5.0)
        if self._connected:
            self.ray.shutdown()

    # For groups.

    def actors_of(self, group: RayGroup) -> list[Any]:
        """New actors, each in its bundle of the group's placement."""
        strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        needs = group.needs
        return [
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

    def follow(self, group: RayGroup, actors: _Actors, rank: int, kind: str, reference: Any) -> None:
        """Have the engine's thread told when a reference has its value, or has failed."""

        def arrived(future: Any) -> None:
            error = future.exception()
            self.arrive(group, actors, rank, kind, error if error is not None else future.result())

        reference.future().add_done_callback(arrived)

    def arrive(self, group: RayGroup, actors: _Actors, rank: int, kind: str, value: Any) -> None:
        """Tell the engine's thread what a reference became."""
        self._arrived.put((group, actors, rank, kind, value))

    # The engine's thread.

    def _wake(self) -> None:
        self._arrived.put(None)

    def _wait(self, until: float) -> _Arrived | None:
        try:
            return self._arrived.get(timeout=max(0.001, until - time.monotonic()))
        except queue.Empty:
            return None

    def _hear(self, arrived: _Arrived | None) -> None:
        while arrived is not None:
            group, actors, rank, kind, value = arrived
            group.hear(actors, rank, kind, value)
            arrived = None if self._arrived.empty() else self._arrived.get()


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
        reason = one_line(str(error).partition("\n")[0])
        return Failure(rank, "died", f"ended ({type(error).__name__}: {reason})", time.monotonic())
    text = f"{type(error).__name__}: {one_line(str(error))}"
    return Failure(rank, "crash", text, time.monotonic())
