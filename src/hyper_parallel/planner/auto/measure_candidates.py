"""Measures strategies of similar predicted speed with real steps, on the run's own workers.

A prediction is off by some percent, and neighbours often differ by less. So the best few are built as `train` would
build them, stepped on the run's first batch, in turns where memory allows, and let go; the run then begins from its
seed with the quickest, as if it had been written.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from hyper_parallel.config import RunConfig
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.launch import Worker
from hyper_parallel.shard import sharded
from hyper_parallel.step.batches import Batches
from hyper_parallel.step.build import build, fill
from hyper_parallel.step.graph_executor import GraphStepper
from hyper_parallel.step.recipe import Recipe
from hyper_parallel.step.train_step import Stepper

WARM = 2
"""Steps before those that are timed."""
LEAST, MOST = 4, 20
"""Steps that are timed: as many as go into `SECONDS`, within these."""
SECONDS = 4.0
SLOW = 1.5
"""Whose quickest of `LEAST` steps takes this many times that of the best is stepped no more."""

Say = Callable[[str], None]


def tried(
    runs: Sequence[RunConfig], worker: Worker, *, at_once: bool, say: Say = lambda _: None
) -> list[float | None]:
    """Seconds of a step of each run, equal on every rank; None for one that cannot be run. A collective.

    The lower quartile of some steps, on the slowest rank: what else the machine does only adds to a step, and not to
    all alike, so the quicker ones tell more of the strategy. `at_once`: all are built at once and stepped in turns,
    which levels what is slow for longer; else each run's model is let go before the next is built.
    """
    found: list[float | None] = [None] * len(runs)
    places = range(len(runs))
    for group in [places] if at_once else [[place] for place in places]:
        steps: dict[int, Callable[[], None]] = {}
        for place in group:
            say(f"trying {place + 1} of {len(runs)} for a few steps")
            with contextlib.suppress(HyperParallelError):  # raised on every rank
                steps[place] = stepped(runs[place], worker)
        for place, seconds in _timed(steps, worker).items():
            found[place] = seconds
        del steps
        gc.collect()
    return found


def stepped(config: RunConfig, worker: Worker) -> Callable[[], None]:
    """One training step of a run, as `train` does it, on the same batch each time. Errors are those of `train`."""
    built = build(config, None, worker.device)
    fill(built, config, worker.device)
    recipe = Recipe.of(config, built.model)
    if built.graphs is not None:
        stepper: Stepper | GraphStepper = GraphStepper(recipe, built.graphs)
    else:
        stepper = Stepper(recipe, None if built.pipeline is None else built.pipeline.train)
    train, text = config.train, built.text
    batches = Batches(
        text.train, text.order, train.batch, train.micro_batch, sharded(built.model), worker.device
    )
    batch = batches.load(0, 0)
    stepper.begin(batch)

    def step() -> None:
        stepper.run(load_next=lambda: batch, memory=0.0)

    return step


def _timed(steps: Mapping[int, Callable[[], None]], worker: Worker) -> dict[int, float]:
    """Seconds of each step on the slowest rank; those that cannot be taken are left out."""
    once: dict[int, float] = {}
    for place, step in steps.items():
        with contextlib.suppress(HyperParallelError):  # raised on every rank
            once[place] = [_seconds(step, worker) for _ in range(WARM)][-1]
    if not once:
        return {}
    rounds = round(min(max(SECONDS * len(once) / _slowest(sum(once.values()), worker), LEAST), MOST))
    taken: dict[int, list[float]] = {place: [] for place in once}
    going = list(taken)
    collects = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds):
            for place in going:
                taken[place].append(_seconds(steps[place], worker))
            if turn + 1 == LEAST:
                least = {place: _slowest(min(taken[place]), worker) for place in going}
                going = [place for place in going if least[place] <= SLOW * min(least.values())]
    finally:
        if collects:
            gc.enable()
    return {place: _quick(seconds, worker) for place, seconds in taken.items()}


def _quick(seconds: Sequence[float], worker: Worker) -> float:
    """The lower quartile on the slowest rank."""
    return _slowest(statistics.quantiles(seconds, n=4, method="inclusive")[0], worker)


def _seconds(step: Callable[[], None], worker: Worker) -> float:
    """Of one step, which all ranks begin together."""
    dist.barrier()
    begun = time.perf_counter()
    step()
    worker.backend.synchronize()
    return time.perf_counter() - begun


def _slowest(seconds: float, worker: Worker) -> float:
    """The largest of all ranks' numbers, on each of them."""
    found = torch.tensor(seconds, device=worker.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)
