"""`train.profile`: measures a few steps and compares them with their prediction; or traces them on each rank.

A step that is one graph is measured operator by operator (`Profiling`). Where parts of a model are on several ranks, it
is PyTorch's profiler that traces each rank's steps, with the Program's instructions as marks (`StepTraces`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from hyper_parallel.cluster import Cluster
from hyper_parallel.config.train import ProfileConfig
from hyper_parallel.graph import lower
from hyper_parallel.graph.dynamic_sizes import balanced_sizes
from hyper_parallel.graph.profile import Profiler
from hyper_parallel.launch import Worker
from hyper_parallel.launch.heartbeat import pulse
from hyper_parallel.report import page, perfetto
from hyper_parallel.simulator import simulate
from hyper_parallel.step.graph_cache import Captured, RunsStep
from hyper_parallel.trace import Timeline
from hyper_parallel.units import format_duration

log = logging.getLogger(__name__)

SKIPPED = 2
"""Steps before the first that is measured: what is set up once is no part of a step."""


class Profiling:
    """Measures the steps of rank 0."""

    def __init__(
        self, config: ProfileConfig, out: Path, worker: Worker, flops: float, peak_flops: float | None
    ) -> None:
        """`flops`: model FLOPs of a step, all ranks together; `peak_flops`: of one device.

        Raises ConfigError for a cluster that is not known, before anything is trained.
        """
        self._config, self._folder, self._worker = config, out / "profile", worker
        self._flops, self._peak = flops, peak_flops
        self._cluster = Cluster.named(config.cluster).for_workers(worker.world) if config.cluster else None
        self._seen = 0
        self._graph: Captured | None = None
        self._profiler: Profiler | None = None
        self.written: list[str] | None = None
        """The page and the traces, once they are there."""

    def runner(self, graph: Captured) -> RunsStep | Profiler:
        """What runs the next step: the graph as it is, or with a clock."""
        self._seen += 1
        if self._seen <= SKIPPED or self._config.steps == 0:
            return graph.executable
        if self._profiler is None:
            self._graph = graph
            clock = self._worker.backend.Clock()
            self._profiler = Profiler(graph.step, clock, balanced_sizes(graph.step), graph.runtime)
        # A batch of another shape has another graph, and is no more of the same.
        return self._profiler if graph is self._graph else graph.executable

    def ended(self, micro_batches: int) -> None:
        """A step has ended; the files are written when enough were measured."""
        profiler = self._profiler
        if profiler is None or self._folder is None or len(profiler.steps) < self._config.steps:
            return
        self._profiler, self._config = None, self._config.model_copy(update={"steps": 0})
        assert self._graph is not None
        classes = dict.fromkeys(range(self._worker.world), "all")
        measured = profiler.timeline(
            classes,
            device=self._worker.backend.device_name(),
            model_flops=self._flops,
            micro_batches=micro_batches,
            peak_flops=self._peak,
            capacity=float(self._worker.backend.memory_total()),
        )
        shown = [measured]
        if self._cluster is not None:
            step = self._graph.plain
            trace = lower(
                {"all": step},
                classes,
                sizes=balanced_sizes(step),
                model_flops=self._flops,
                micro_batches=micro_batches,
            )
            shown.append(simulate(trace, self._cluster))
        self._write(shown, len(profiler.steps))

    def _write(self, shown: list[Timeline], steps: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for timeline in shown:
            (self._folder / f"{timeline.word}.json").write_text(perfetto(timeline), encoding="utf-8")
        (self._folder / "page.html").write_text(page(shown, "A step of this run"), encoding="utf-8")
        files = ["page.html", *(f"{timeline.word}.json" for timeline in shown)]
        self.written = [str(self._folder / name) for name in files]
        told = ", ".join(f"{timeline.word} {format_duration(timeline.step)}" for timeline in shown)
        log.info("profile: %s a step (the median of %d, on rank 0); %s/page.html", told, steps, self._folder)


class StepTraces:
    """PyTorch's profile of a few steps on this rank, in which each instruction of the Program is a range."""

    def __init__(self, steps: int, out: Path, worker: Worker) -> None:
        """`steps`: the number of those that are traced; `out`: the run's folder."""
        self._left, self._seen = steps, 0
        self._files = [str(out / "profile" / f"rank-{rank}.json") for rank in range(worker.world)]
        self._rank = worker.rank
        self._profiler: torch.profiler.profile | None = None
        self._mark: torch.profiler.record_function | None = None
        self.written: list[str] | None = None
        """The traces of all ranks, once they are there."""

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Inside, the rank computes this step, counted from 1; it is traced after the first steps."""
        self._seen += 1
        if self._seen <= SKIPPED or not self._left:
            yield
            return
        if self._profiler is None:
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        with torch.profiler.record_function(f"step {number}"), pulse.followed(self._begins):
            yield
        self._left -= 1
        if not self._left:
            self._write()

    def _begins(self, instruction: str) -> None:
        """Ranges end where the next one begins, or the schedule ends."""
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
        self._mark = torch.profiler.record_function(instruction) if instruction else None
        if self._mark is not None:
            self._mark.__enter__()

    def _write(self) -> None:
        assert self._profiler is not None
        self._profiler.stop()
        file = Path(self._files[self._rank])
        file.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(file))
        self._profiler, self.written = None, self._files
