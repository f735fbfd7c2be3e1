"""Masking on real workers: collectives over loopback, kernels that sleep. Part of `masking.py`, which says how."""

from __future__ import annotations

import os
import socket
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import hyper_parallel as hp
from hyper_parallel.calibrate.collectives import fit
from hyper_parallel.cluster import Cluster
from hyper_parallel.cluster.device import Device, Link, Tier
from hyper_parallel.cluster.measured import CollectiveTable
from hyper_parallel.compat import collectives
from hyper_parallel.config.train import AdamWConfig, ScheduleConfig
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.costs import costs
from hyper_parallel.overlap import Usual, overlap
from hyper_parallel.overlap.arrange import COMPUTE
from hyper_parallel.overlap.choose import simulated
from hyper_parallel.overlap.jobs import Prices, jobs_of
from hyper_parallel.program import Collective
from hyper_parallel.train.optimizer import build_optimizer
from hyper_parallel.train.recipe import Recipe
from hyper_parallel.train.schedule import schedule
from hyper_parallel.train.whole_step import BatchShape, capture_step

WORLD, REPEATS = 2, 7
COMPUTE_TO_COMMUNICATION = 1.5
"""What the made-up device is made to take for its kernels."""


def run() -> dict[str, Any]:
    """Simulated beside measured masking, of the usual schedule and of the overlap pass."""
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = [context.Process(target=_worker, args=(rank, port, queue)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    result: dict[str, Any] = queue.get()
    for process in processes:
        process.join()
    for name, one in result["schedules"].items():
        masked = f"{one['masked_simulated']:.1%} simulated, {one['masked_measured']:.1%} measured"
        seconds = f"{one['step_simulated_s']:.3f} s simulated, {one['step_measured_s']:.3f} s measured"
        print(f"{name}: masked by blocked time {masked}; step {seconds}")
    return result


def _worker(rank: int, port: int, queue: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    step = _step()
    cluster, spread = _cluster(step)
    schedules = {"usual": Usual()(step), "overlap": overlap(step, cluster).step}
    found = {}
    for name, graph in schedules.items():
        timeline = simulated(graph, cluster, {})
        player = _Player(graph, cluster)
        runs = [player.run() for _ in range(REPEATS + 1)][1:]
        taken = statistics.median(seconds for seconds, _ in runs)
        blocked = statistics.median(blocked for _, blocked in runs)
        told = torch.tensor([taken, blocked])
        dist.all_reduce(told)
        taken, blocked = (told / WORLD).tolist()
        found[name] = {
            "masked_simulated": timeline.masked.blocked,
            "masked_measured": 1 - blocked / timeline.communicating,
            "step_simulated_s": timeline.step,
            "step_measured_s": taken,
        }
    if rank == 0:
        queue.put({"workers": WORLD, "spread_of_collectives": spread, "schedules": found})
    dist.barrier()
    dist.destroy_process_group()


def _step() -> StepGraph:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=2048,
                hidden_size=512,
                intermediate_size=1024,
                num_hidden_layers=6,
                num_attention_heads=8,
                max_position_embeddings=1024,
            )
        )
    strategy = {"version": 1, "axes": {"tensor": WORLD}, "sequence": True}
    hp.parallelize(model, hp.Strategy.model_validate(strategy), lowering="traceable")
    plan = schedule(ScheduleConfig(name="constant"), 10)
    recipe = Recipe(model, hp.sharded(model), build_optimizer(model, AdamWConfig(lr=1e-3)), plan, clip=1.0)
    return capture_step(recipe, BatchShape(((2, 512),) * 2, (False,) * 2))


def _cluster(step: StepGraph) -> tuple[Cluster, float]:
    """A made-up device, and links as these workers' collectives are: each that the step makes, timed."""
    calls = {(c.kind, c.bytes): c for c in costs(step).values() if isinstance(c, Collective)}
    seconds: dict[tuple[str, int], float] = {}
    spreads = []
    for kind, size in sorted(calls):
        times = []
        for _ in range(15):
            dist.barrier()
            begun = time.perf_counter()
            collectives.waited(_begin(kind, torch.ones(size // 4)))
            times.append(time.perf_counter() - begun)
        times.sort()
        told = torch.tensor([times[7], (times[11] - times[3]) / times[7]])
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        seconds[kind, size] = told[0].item()
        spreads.append(told[1].item())
    tables = []
    for kind in sorted({kind for kind, _ in calls}):
        points = {size: taken for (other, size), taken in seconds.items() if other == kind}
        latency, bandwidth, residual = fit(kind, WORLD, points)
        tables.append(
            CollectiveTable(kind, "node", WORLD, tuple(points.items()), latency, bandwidth, residual)
        )
    sent = sum(seconds[c.kind, c.bytes] for c in costs(step).values() if isinstance(c, Collective))
    cluster = Cluster(
        device=_device(1e12),
        links={"node": Link("node", 1e9, 0.0)},
        collectives=tuple(tables),
        source="collectives measured on these workers; the device is made up",
        name="workers",
        ranks=WORLD,
    )
    assert cluster.device is not None
    prices = Prices(cluster)
    computed = sum(job.seconds for job in jobs_of(step, prices, {}).jobs if job.queue == COMPUTE)
    rate = 1e12 * computed / (COMPUTE_TO_COMMUNICATION * sent)
    return replace(cluster, device=_device(rate)), statistics.mean(spreads)


def _device(rate: float) -> Device:
    return Device("sleeps", {"float32": rate}, {"float32": rate}, Tier("device", 1e15, 1e30, 1e30))


def _begin(kind: str, x: torch.Tensor) -> torch.Tensor:
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
        jobs = jobs_of(step, Prices(cluster), {})
        done = costs(step)
        self.acts: list[tuple[str, Any]] = []
        for at, (node, job) in enumerate(zip(jobs.nodes, jobs.jobs, strict=True)):
            cost = done.get(node)
            if isinstance(cost, Collective):
                self.acts.append(("begin", (at, cost.kind, torch.ones(cost.bytes // 4))))
            elif job.waits is not None:
                self.acts.append(("wait", job.waits))
            elif job.seconds:
                if self.acts and self.acts[-1][0] == "sleep":
                    self.acts[-1] = ("sleep", self.acts[-1][1] + job.seconds)
                else:
                    self.acts.append(("sleep", job.seconds))

    def run(self) -> tuple[float, float]:
        """Seconds of the step, and seconds in which collectives held it up."""
        dist.barrier()
        blocked, late = 0.0, 0.0
        begun: dict[int, torch.Tensor] = {}
        waited: set[int] = set()
        start = time.perf_counter()
        for act, what in self.acts:
            before = time.perf_counter()
            if act == "sleep":
                # What was slept too long is taken off the next sleep.
                if what > late:
                    time.sleep(what - late)
                late += time.perf_counter() - before - what
                continue
            if act == "begin":
                at, kind, given = what
                begun[at] = _begin(kind, given)
            elif what not in waited:
                waited.add(what)
                collectives.waited(begun[what])
            blocked += time.perf_counter() - before
        return time.perf_counter() - start, blocked
