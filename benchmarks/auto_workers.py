"""Some strategies of a run file, stepped in turns by the same real workers. Part of `auto.py`, which says how."""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from hyper_parallel.config import RunConfig
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.launch import Worker
from hyper_parallel.planner.auto.entry import together
from hyper_parallel.planner.auto.measure_candidates import stepped
from hyper_parallel.planner.auto.resolved import resolved

TASK = "HYPER_PARALLEL_BENCHMARK_TASK"
"""The environment's name for the file with the strategies, and how often each is stepped."""


def choose(config: RunConfig, worker: Worker) -> None:
    """What `train` does first: the strategy is chosen, and written to the run's folder."""
    together(config, worker)


def measure(config: RunConfig, worker: Worker) -> None:
    """What each of the four workers runs: its strategies are built, then stepped round after round.

    What is `drop` times as slow as the best after a round is stepped no more.
    """
    task = json.loads(Path(os.environ[TASK]).read_text())
    steps: list[Callable[[], None] | None] = []
    refused: dict[int, str] = {}
    for index, laid in enumerate(task["strategies"]):
        try:
            steps.append(stepped(resolved(config, laid), worker))
        except HyperParallelError as error:
            refused[index] = str(error)
            steps.append(None)
        if worker.rank == 0 and index % 10 == 9:
            print(f"  {index + 1} of {len(task['strategies'])} built", flush=True)
    slowest = {index: math.inf for index, step in enumerate(steps) if step is not None}
    taken: dict[int, list[float]] = {index: [] for index in slowest}
    going = list(slowest)
    for turn in range(task["rounds"] + 1):
        for index in going:
            taken[index] += _timed(steps[index], task["steps"])
        if turn == 0:  # it warms up
            taken = {index: [] for index in slowest}
            continue
        medians = torch.tensor([statistics.median(taken[index]) for index in slowest])
        dist.all_reduce(medians, op=dist.ReduceOp.MAX)
        slowest = dict(zip(slowest, medians.tolist(), strict=True))
        going = [index for index in going if slowest[index] <= task["drop"] * min(slowest.values())]
    if worker.rank == 0:
        found = [
            {"refused": refused[index]} if index in refused else {"seconds": slowest[index]}
            for index in range(len(steps))
        ]
        Path(task["out"]).write_text(json.dumps(found))


def _timed(step: Callable[[], None] | None, steps: int) -> list[float]:
    """Seconds of a few steps, each begun by all ranks together."""
    assert step is not None, "what was refused is not stepped"
    gc.collect()
    gc.disable()
    seconds = []
    for _ in range(steps):
        dist.barrier()
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
    gc.enable()
    return seconds
