"""A step's graph run with a clock: when each node began and ended, as a measured Timeline.

A node's time is that from the end of the node before it to its own end: its operator, the Python around it, and the
release of what dies with it. A collective runs from the node that begins it until somebody has waited for it, as far as
the host can see; the wait is idle time. So is what the host does at a host point. Memory is that of `graph.liveness`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import torch
from torch import fx

from hyper_parallel.compat.backend import Clock
from hyper_parallel.graph.execute import Cache, Executable, Host, executable
from hyper_parallel.graph.host_nodes import HOST
from hyper_parallel.graph.ir import StepGraph, is_collective, is_wait, prefetch, slot_of, store, wait
from hyper_parallel.graph.lower import Lowered, lowered
from hyper_parallel.graph.memory_effects import begun
from hyper_parallel.trace import Span, Timeline, Trace


class Profiler:
    """Runs a graph and measures it."""

    def __init__(
        self,
        step: StepGraph,
        clock: Clock,
        sizes: Mapping[object, int] | None = None,
        cache: Cache | None = None,
    ) -> None:
        """`clock`: of the device that runs it (`Backend.Clock`). `sizes`: values of sizes that the data decide, by
        which the Timeline counts bytes and FLOPs. `cache`: what moves its storages."""
        self.executable: Executable = executable(step, clock.stamp, cache)
        self._clock = clock
        self._step, self._sizes = step, sizes
        self._runs: list[list[float]] = []

    def run(self, tensors: Mapping[str, torch.Tensor], host: Host | None = None) -> dict[str, torch.Tensor]:
        """`Executable.run`, measured."""
        try:
            returned = self.executable.run(tensors, host)
        except BaseException:
            self._clock.read()
            raise
        self._runs.append(self._clock.read())
        return returned

    @property
    def steps(self) -> list[float]:
        """Seconds of each run."""
        return [stamps[-1] for stamps in self._runs]

    def timeline(
        self,
        classes: Mapping[int, str] | None = None,
        *,
        device: str,
        model_flops: float = 0.0,
        micro_batches: int = 1,
        peak_flops: float | None = None,
        capacity: float | None = None,
    ) -> Timeline:
        """The run whose length is the median of all.

        `classes`: every rank's class, the same one; left out, there is one rank. `capacity`: bytes of the
        device's memory. The others are those of `lower` and of Timeline.
        """
        found = lowered(self._step, sizes=self._sizes)
        classes = dict(classes or {0: "all"})
        (name,) = set(classes.values())
        trace = Trace({name: found.ops}, classes, {name: found.resident}, model_flops, micro_batches)
        middle = statistics.median_low(self.steps)
        stamps = next(stamps for stamps in self._runs if stamps[-1] == middle)
        return Timeline(
            trace,
            _spans(self._step, found, stamps, trace.first(name)),
            predicted=False,
            device=device,
            peak_flops=peak_flops,
            capacity={} if capacity is None else {"device": capacity},
        )


def _spans(step: StepGraph, found: Lowered, stamps: list[float], rank: int) -> tuple[Span, ...]:
    """A span for each op. `stamps`: of the beginning and of the end of each node."""
    place = {node: at for at, node in enumerate(step.nodes)}
    assert len(stamps) == len(place) + 1, f"{len(stamps)} stamps of {len(place)} nodes"
    waited = {begun(node): stamps[place[node] + 1] for node in reversed(list(step.nodes)) if is_wait(node)}
    waited |= _copied(step, stamps, place)
    spans = []
    for op, node in zip(found.ops, found.nodes, strict=True):
        start, end = stamps[place[node]], stamps[place[node] + 1]
        if is_collective(node) or op.queue.startswith("copy:"):
            end = waited.get(node, end)
        elif is_wait(node) or node.target in (HOST, wait):
            start = end
        spans.append(Span(rank, op.engine, start, end, op, start))
    return tuple(spans)


def _copied(step: StepGraph, stamps: list[float], place: Mapping[fx.Node, int]) -> dict[fx.Node, float]:
    """Each store and prefetch to the end of the wait for it, or of the step."""
    found: dict[fx.Node, float] = {}
    running: dict[int, fx.Node] = {}
    for node in step.nodes:
        if node.target in (store, prefetch):
            running[slot_of(node)] = node
            found[node] = stamps[-1]
        elif node.target is wait and slot_of(node) in running:
            found[running.pop(slot_of(node))] = stamps[place[node] + 1]
    return found
