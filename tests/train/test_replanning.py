"""A link that becomes slow in mid-run: all ranks plan anew before the same step, and nothing else changes."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import Ran, differences, of_graph, run_engine

from harness import run_ranks
from hyper_parallel.offloading import Move, choose, open_tiers
from hyper_parallel.offloading import runtime as bandwidth_monitor
from hyper_parallel.offloading.schedule import equal_graphs
from hyper_parallel.offloading.schedule.problem import Buffer, OffloadTier, Problem, Rate, UseInterval
from hyper_parallel.offloading.tiers.memory_tier import HostTier
from hyper_parallel.step.replan import QUIET, Replanning

SLOW_FROM = 6
RATE = Rate(1e-6, 2e9)
SECTIONS: dict[str, Any] = {"train": {"steps": 20, "micro_batch": 8}}


@contextmanager
def _slow_link(slow: float) -> Iterator[None]:
    """A host whose rate is known, and from a step on `slow` times as slow."""
    with pytest.MonkeyPatch.context() as patch:
        steps: list[int] = []
        ended, begin, usual = bandwidth_monitor.BandwidthMonitor.ended, HostTier._begin, Replanning.plan_anew

        def count(self: bandwidth_monitor.BandwidthMonitor) -> None:
            steps.append(1)
            ended(self)

        def slowed(self: HostTier, what: str, x: torch.Tensor, *given: Any) -> Any:
            copy = begin(self, what, x, *given)
            known = RATE.seconds(x.numel()) * (slow if len(steps) >= SLOW_FROM else 1.0)
            # As long as it takes, and not as long as this machine happens to take.
            patch.setattr(type(copy), "seconds", property(lambda one: one.known if one.done() else None))
            copy.known = known
            return copy

        def plan_anew(self: Replanning) -> None:
            logging.getLogger("hyper_parallel").info("after step %d", len(steps))
            usual(self)

        patch.setattr(bandwidth_monitor.BandwidthMonitor, "ended", count)
        patch.setattr(Replanning, "plan_anew", plan_anew)
        patch.setattr(HostTier, "_begin", slowed)
        patch.setattr(bandwidth_monitor, "LARGE", 1024)
        patch.setattr(equal_graphs, "choose", functools.partial(choose, tries=10))
        patch.setattr(open_tiers, "measure", lambda *args: (RATE, RATE))
        yield


def _ran(rank: int, world: int, folder: Path, device: int, sections: dict[str, Any], slow: float) -> Ran:
    memory = {"device": device, "host": "64MiB"}
    strategy = {**sections.get("strategy", {}), "memory": memory}
    with _slow_link(slow if rank == world - 1 else 1.0):
        return run_engine(rank, folder, f"slow-{device}", "graph", {**sections, "strategy": strategy})


def _compared(rank: int, world: int, folder: Path, sections: dict[str, Any], slow: float) -> tuple[Ran, Ran]:
    moved = _ran(rank, world, folder, 1_300_000 if world == 1 else 900_000, sections, slow)
    return moved, run_engine(rank, folder, f"free-{world}", "eager", sections)


def _said(ran: Ran, start: str) -> list[str]:
    return [note for note in ran.notes if note.startswith(start)]


def test_a_link_that_becomes_slow_is_planned_for_and_the_bits_stay(tmp_path: Path) -> None:
    moved, eager = _compared(0, 1, tmp_path, SECTIONS, 5.0)
    assert of_graph(moved)
    assert differences(moved, eager) == {}
    (said,) = _said(moved, "links: ")
    found = re.search(r"predicted ([\d.]+) ms a step instead of ([\d.]+) ms", said)
    assert found is not None, said
    assert float(found[1]) < 0.97 * float(found[2])
    assert "from host 0.4 GB/s instead of 2, to host 0.4 GB/s instead of 2" in said
    assert _said(moved, "after step ") == [f"after step {SLOW_FROM + bandwidth_monitor.STEPS + 1}"]


@pytest.mark.matrix
def test_all_workers_plan_anew_before_the_same_step(tmp_path: Path) -> None:
    sections = {"train": {"steps": 20, "micro_batch": 4}, "strategy": {"axes": {"shard": 2}}}
    (first, eager), (second, other) = run_ranks(_compared, 2, tmp_path, sections, 5.0)
    assert _said(first, "after step ") == _said(second, "after step ") != []
    assert "those of another worker" in _said(first, "links: ")[0]
    assert "from host 0.4 GB/s instead of 2" in _said(second, "links: ")[0]
    assert differences(first, eager) == differences(second, other) == {}


def test_links_that_nothing_waits_for_and_plans_that_are_no_better_are_let_be() -> None:
    watched, budget, graphs = SimpleNamespace(), SimpleNamespace(), SimpleNamespace()
    rate, slower = Rate(0.0, 1e3), Rate(0.0, 1e2)
    held = Buffer(0, 1000, "parameter", (UseInterval(0, 0, False), UseInterval(3, 3, False)), True)
    problem = Problem((0.0, 2.0, 4.0, 6.0, 8.0), (held,), (), (OffloadTier("host", 10**6, rate, rate),), 0)
    measured = (OffloadTier("host", 10**6, slower, slower),)
    runtime, notes = object(), list[str]()
    found = SimpleNamespace(problem=problem, plan=SimpleNamespace(moves=(), seconds=8.0))
    watched.departed, watched.measured = {("host", True): 10.0}, lambda: measured
    watched.told, watched.ended = lambda: iter(["to host"]), lambda: None
    budget.watch, budget.found, budget.plan_by = watched, {runtime: found}, lambda spaces: None
    graphs.captured = [SimpleNamespace(runtime=runtime, load=None)]
    graphs.note, graphs.planned_anew = notes.append, lambda graph, load: "there is none"
    one = Replanning(graphs, budget)

    def steps_until_asked(most: int) -> int | None:
        for step in range(most):
            if one.wanted():
                return step
            one.due(False)
        return None

    assert steps_until_asked(3 * QUIET) is None, "nothing moves, so that nothing waits"
    found.plan.moves = (Move(0, "host", 0, 1, 1, 2),)
    assert steps_until_asked(2 * QUIET) is not None
    for times in (2, 4, 8):
        assert one.due(True)
        one.plan_anew()
        assert "nothing changes" in notes[-1]
        assert steps_until_asked(10 * QUIET) == times * QUIET, "longer each time"
