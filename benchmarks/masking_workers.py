"""Masking on real workers: collectives over loopback, kernels that sleep. Part of `masking.py`, which says how."""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from processes import Stepping, scratch
from shapes import llama
from training import build, captured

import hyper_parallel as hp
from hyper_parallel.calibrate.measure import fit
from hyper_parallel.cluster import Cluster
from hyper_parallel.cluster.device import CollectiveTable, Device, Link, Tier
from hyper_parallel.compat import collectives
from hyper_parallel.graph import StepGraph, lower
from hyper_parallel.graph.costs import costs
from hyper_parallel.overlap import FsdpBaseline, overlap
from hyper_parallel.overlap.jobs import Priced, Prices, jobs_of
from hyper_parallel.overlap.list_scheduling import COMPUTE
from hyper_parallel.simulator import simulate
from hyper_parallel.simulator.engine import Run
from hyper_parallel.simulator.op_costs import Costs, Leg
from hyper_parallel.trace import Collective, Timeline

WORLD, REPEATS = 2, 11
DRAWS = 25
"""Steps that are simulated."""
COMPUTE_TO_COMMUNICATION = 1.5
"""What the made-up device is made to take for its kernels."""


def simulated(step: StepGraph, cluster: Cluster, sizes: Mapping[Any, int] | None = None) -> Timeline:
    """What a step would take where every rank runs it."""
    ranks = {rank for group in step.groups.values() for rank in group.ranks} | {0}
    trace = lower({"all": step}, dict.fromkeys(sorted(ranks), "all"), sizes=sizes, views=False)
    return simulate(trace, cluster)


def measured() -> dict[str, Any]:
    """Simulated beside measured masking, of the usual schedule and of the overlap pass."""
    with scratch() as folder:
        ranks = [Stepping(rank_of_workers, rank, str(folder / "store")) for rank in range(WORLD)]
        for process in ranks:
            process.begin()
        try:
            result, _ = (process.answer() for process in ranks)
        finally:
            for process in ranks:
                process.process.kill()
                process.close()
    print(result)
    return result


def rank_of_workers(rank: int, store: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # As on an accelerator's queue; gloo's two threads would send two at once.
    options._threads = 1
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, pg_options=options
    )
    fields = llama(512, 3, 8, inner=1024, kv=8, vocabulary=2048, positions=1024)
    strategy = hp.Strategy(axes={"tensor": WORLD}, sequence=True)
    step = captured(build(fields, strategy), 8, 1024, micro_batches=2)
    planned = _machine(step, _begun(step))
    schedules = {"usual": FsdpBaseline()(step), "overlap": overlap(step, planned).step}
    players = {name: _Player(graph, planned) for name, graph in schedules.items()}
    # In the step's own rhythm, with the order of the model's code, where each is waited for at once: between kernels
    # that sleep the processors are in another state than in a row of collectives. In turns with what is compared.
    timer = _Player(step, planned)
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in players}
    for turn in range(REPEATS + 1):
        timer.run()
        for name, player in players.items():
            runs[name].append(player.run())
        if turn == 0:
            timer.taken.clear()
    seconds, spread = _timed(timer)
    cluster = replace(_machine(step, seconds), device=planned.device)
    found = {}
    for name, graph in schedules.items():
        timelines = _drawn(graph, cluster, timer.taken)
        communicating = statistics.mean(timeline.communicating for timeline in timelines)
        exposed = statistics.median(timeline.exposed for timeline in timelines)
        told = torch.tensor([statistics.median(figures) for figures in zip(*runs[name][1:], strict=True)])
        dist.all_reduce(told)
        taken, blocked = (told / WORLD).tolist()
        found[name] = {
            "masked_simulated": 1 - exposed / communicating,
            "masked_measured": 1 - blocked / communicating,
            "masked_simulated_with_means": simulated(graph, cluster).masked.blocked,
            "step_simulated_s": statistics.median(timeline.step for timeline in timelines),
            "step_measured_s": taken,
        }
    dist.barrier()
    dist.destroy_process_group()
    return {"workers": WORLD, "spread_of_collectives": spread, "schedules": found}


def _begun(step: StepGraph) -> dict[tuple[str, int], float]:
    """A first idea of what each collective takes, (kind, bytes) to seconds: ten in a row."""
    begun = {}
    for kind, size in sorted({(c.kind, c.bytes) for c in costs(step).values() if isinstance(c, Collective)}):
        started, given = time.perf_counter(), torch.ones(size // 4)
        for _ in range(10):
            collectives.waited(_begin(kind, given))
        begun[kind, size] = _slowest((time.perf_counter() - started) / 10)
    return begun


def _timed(timer: _Player) -> tuple[dict[tuple[str, int], float], float]:
    """What each collective took, and the mean spread: the distance of the quartiles over the median."""
    seconds, spreads = {}, []
    for call in sorted(timer.taken):
        quarter, median, third = statistics.quantiles(timer.taken[call], n=4)
        seconds[call] = _slowest(statistics.mean(timer.taken[call]))
        spreads.append((third - quarter) / median)
    return seconds, _slowest(statistics.mean(spreads))


class _Drawn(Costs):
    """A cluster on which a collective takes one of the times that were measured for its kind and size."""

    def __init__(self, cluster: Cluster, taken: dict[tuple[str, int], list[float]], seed: int) -> None:
        super().__init__(cluster)
        self._taken, self._draw = taken, random.Random(seed)

    def legs(self, call: Collective) -> tuple[Leg, ...]:
        times = self._taken.get((call.kind, call.bytes))
        if not times:  # a bucket of several, of which none was timed: the line through those that were
            return super().legs(call)
        return (Leg(0.0, self._draw.choice(times), (("link:node", 1.0),)),)


def _drawn(graph: StepGraph, cluster: Cluster, taken: dict[tuple[str, int], list[float]]) -> list[Timeline]:
    """Steps of the simulator, each collective with a time of its own: those that are late are waited for, and those
    that are early win nothing, which a simulation with means does not know."""
    trace = lower({"all": graph}, dict.fromkeys(range(WORLD), "all"), views=False)
    return [
        Timeline(trace, Run(trace, _Drawn(cluster, taken, seed)).spans(), predicted=True, device="sleeps")
        for seed in range(DRAWS)
    ]


def _slowest(seconds: float) -> float:
    told = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return told.item()


def _machine(step: StepGraph, seconds: dict[tuple[str, int], float]) -> Cluster:
    """The cluster on which each collective takes so long, and kernels a multiple of all collectives."""
    tables = []
    for kind in sorted({kind for kind, _ in seconds}):
        points = {size: taken for (other, size), taken in sorted(seconds.items()) if other == kind}
        fitted = fit(kind, WORLD, points)
        tables.append(CollectiveTable(kind, "node", WORLD, tuple(points.items()), *fitted))
    sent = sum(seconds[c.kind, c.bytes] for c in costs(step).values() if isinstance(c, Collective))
    cluster = Cluster(
        device=_device(1e12),
        links={"node": Link("node", 1e9, 0.0)},
        collectives=tuple(tables),
        source="collectives measured on these workers; the device is made up",
        name="workers",
        ranks=WORLD,
    )
    jobs = jobs_of(Priced.of(step), Prices(cluster)).jobs
    computed = sum(job.seconds for job in jobs if job.queue == COMPUTE)
    rate = 1e12 * computed / (COMPUTE_TO_COMMUNICATION * sent)
    return replace(cluster, device=_device(rate))


def _device(rate: float) -> Device:
    return Device("sleeps", {"float32": rate}, {"float32": rate}, Tier("device", 1e15, 1e30, 1e30))


def _begin(kind: str, x: torch.Tensor) -> torch.Tensor:
    assert dist.group.WORLD is not None
    ops, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    if kind == "all_reduce":
        return ops.all_reduce(x, "sum", group)
    if kind == "all_gather":
        return ops.all_gather_into_tensor(x, WORLD, group)
    assert kind == "reduce_scatter", kind
    return ops.reduce_scatter_tensor(x, "sum", WORLD, group)


class _Player:
    """Runs a graph's order: sleeps for kernels, collectives of as many bytes."""

    def __init__(self, step: StepGraph, cluster: Cluster) -> None:
        jobs = jobs_of(Priced.of(step), Prices(cluster))
        done = costs(step)
        self.acts: list[tuple[str, Any]] = []
        self.taken: dict[tuple[str, int], list[float]] = defaultdict(list)
        """By kind and bytes the seconds from the begin of each collective to the end of its wait."""
        for at, (node, job) in enumerate(zip(jobs.nodes, jobs.jobs, strict=True)):
            cost = done.get(node)
            if isinstance(cost, Collective):
                self.acts.append(("begin", (at, cost.kind, torch.ones(cost.bytes // 4))))
            elif job.waits is not None:
                self.acts.append(("wait", job.waits))
            elif job.seconds:
                slept = self.acts.pop()[1] if self.acts and self.acts[-1][0] == "sleep" else 0.0
                self.acts.append(("sleep", slept + job.seconds))

    def run(self) -> tuple[float, float]:
        """Seconds of the step, and seconds in which collectives held it up.

        The device computes on while its host begins a collective: kernels end when they are due, counted from the last
        wait that held them up.
        """
        dist.barrier()
        blocked = 0.0
        begun: dict[int, tuple[torch.Tensor, tuple[str, int], float]] = {}
        due = start = time.perf_counter()
        for act, what in self.acts:
            if act == "sleep":
                due += what
                time.sleep(max(0.0, due - time.perf_counter()))
            elif act == "begin":
                at, kind, given = what
                since = time.perf_counter()
                begun[at] = _begin(kind, given), (kind, given.nbytes), since
            elif what in begun:
                result, call, since = begun.pop(what)
                collectives.waited(result)
                now = time.perf_counter()
                self.taken[call].append(now - since)
                blocked += max(0.0, now - due)
                due = max(due, now)
        return due - start, blocked
