"""Simulates candidate strategies in processes of their own.

A worker has its process group, in which ranks cannot be faked; so rank 0 has processes capture the steps, as many at
once as it has cores, and this one only waits.
"""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from hyper_parallel import config as files
from hyper_parallel.cluster import Cluster
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import HyperParallelError


@dataclass(frozen=True)
class Simulated:
    """What the simulator says of a strategy's step."""

    seconds: float | None
    """None where the step cannot be captured."""
    fits: bool | None = None
    """None where the device's memory is not known."""
    peak: float = 0.0
    """Bytes that a rank holds at most."""
    reason: str = ""
    """Why there is no prediction."""


def simulated(runs: Sequence[RunConfig], cluster: Cluster) -> list[Simulated]:
    """What the simulator says of each run on a cluster, in order."""
    # A cluster that was measured goes along as it is; plain data all the way down.
    tasks = [(run.model_dump_json(), cluster) for run in runs]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["hyper_parallel.estimate"])
    try:
        with ProcessPoolExecutor(max(1, min(cores, len(tasks))), mp_context=context) as pool:
            return list(pool.map(_one, tasks))
    except BrokenProcessPool:
        return [Simulated(None, reason="the process that simulated it was ended")] * len(tasks)


def _one(task: tuple[str, Cluster]) -> Simulated:
    from hyper_parallel.estimate import predict_run

    text, cluster = task
    run = files.RunConfig.model_validate_json(text)
    try:
        found = predict_run(run, cluster)
    except HyperParallelError as error:
        return Simulated(None, reason=str(error))
    return Simulated(found.timeline.step, found.fits, found.timeline.peak.bytes)
