"""One strategy on trial on one rank: a process that builds the run's step, and takes a step each time it is asked.

The processes of all ranks have process groups of their own, beside the run's, through the run's store. What a trial
takes (memory, groups and their threads, tiers of a budget) ends with its process, also where it hangs and is killed.

    worker                          process of the trial
      Trial(...)        ─────▶      builds, plans, `WARM` steps
      answered          ◀─────      seconds of the last, or why it cannot run
      ask, answered     ◀────▶      a step, its seconds
      close             ─────▶      gives its tiers back, and ends
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing as mp
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from hyper_parallel import compat
from hyper_parallel.compat.process_groups import Address, connected
from hyper_parallel.config import RunConfig
from hyper_parallel.launch import Worker
from hyper_parallel.proc import die_with
from hyper_parallel.shard import sharded
from hyper_parallel.step.batches import Batches
from hyper_parallel.step.build import Built, build
from hyper_parallel.step.graph_executor import GraphStepper
from hyper_parallel.step.train_step import Stepper
from hyper_parallel.train.run_parts import recipe_of

WARM = 2
"""Steps before those that are timed."""
GRACE = 3.0
"""Seconds in which a process gives back what it has; then it is killed."""


@dataclass(frozen=True)
class Place:
    """The worker of a rank, for the process of its trial."""

    rank: int
    local_rank: int
    world: int
    local_world: int
    backend: str
    threads: int
    store: Address | None
    """None for one rank."""
    prefix: str
    """Of the trial's keys in the store."""
    seconds: float
    """Time limit of its collectives."""

    @classmethod
    def of(cls, worker: Worker, store: Address | None, prefix: str, seconds: float) -> Place:
        """The place of a worker's process."""
        return cls(
            worker.rank,
            worker.local_rank,
            worker.world,
            worker.local_world,
            worker.backend.name,
            torch.get_num_threads(),
            store,
            prefix,
            seconds,
        )


@dataclass(frozen=True)
class Answer:
    """A process's report of a step."""

    seconds: float = 0.0
    """Of this rank."""
    reason: str = ""
    """Why there is none; empty where there is one."""


class Trial:
    """The process of this rank for one strategy."""

    def __init__(self, run: RunConfig, place: Place) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._here, there = context.Pipe()
        self.process = context.Process(target=work, args=(there, run.model_dump_json(), place), daemon=True)
        self.process.start()
        there.close()

    def ask(self) -> None:
        """Have it take a step. A process that has ended answers with the reason."""
        with contextlib.suppress(OSError):
            self._here.send(True)

    def answer(self, patience: float) -> Answer | None:
        """Its message, if one comes within `patience` seconds."""
        if not self._here.poll(patience):
            return None
        try:
            found = self._here.recv()
        except (EOFError, OSError):
            self.process.join(GRACE)
            return Answer(reason=f"its process ended with {self.process.exitcode}")
        assert isinstance(found, Answer)
        return found

    def release(self) -> None:
        """Have it end."""
        self._here.close()

    def close(self) -> None:
        """It has ended when this returns; one that does not by itself is killed."""
        self.release()
        self.process.join(GRACE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


def work(there: Connection, text: str, place: Place) -> None:
    """The process's own side."""
    die_with(os.getppid())
    _be_silent()
    built: Built | None = None
    try:
        backend = compat.backend(place.backend, workers=place.local_world)
        torch.set_num_threads(place.threads)
        device = backend.device(place.local_rank)
        backend.set_device(device)
        dist.init_process_group(
            backend.process_group,
            store=connected(place.store, place.prefix, timedelta(seconds=place.seconds)),
            rank=place.rank,
            world_size=place.world,
            timeout=timedelta(seconds=place.seconds),
        )
        config = RunConfig.model_validate_json(text)
        built = build(config, None, device)
        step = step_of(config, built, device)

        def seconds() -> float:
            dist.barrier()
            begun = time.perf_counter()
            step()
            backend.synchronize()
            return time.perf_counter() - begun

        there.send(Answer([seconds() for _ in range(WARM)][-1]))
        while there.recv():
            there.send(Answer(seconds()))
    except EOFError:  # nobody asks any more
        pass
    except Exception as error:  # of any kind: the worker tells it, and the run goes on without this strategy
        with contextlib.suppress(OSError):
            there.send(Answer(reason=_line(error)))
    finally:
        there.close()
        if built is not None and built.budget is not None:
            built.budget.close()


def step_of(config: RunConfig, built: Built, device: torch.device) -> Callable[[], None]:
    """One training step of a run, as `train` does it, on the same batch each time. Errors are those of `train`."""
    handle = sharded(built.model)
    recipe = recipe_of(config, built, handle, device)
    if built.graphs is not None:
        stepper: Stepper | GraphStepper = GraphStepper(recipe, built.graphs)
    else:
        stepper = Stepper(recipe, None if built.pipeline is None else built.pipeline.train)
    train, text = config.train, built.text
    batches = Batches(text.train, text.order, train.batch, train.micro_batch, handle, device)
    batch = batches.load(0, 0)
    stepper.begin(batch)

    def step() -> None:
        stepper.run(load_next=lambda: batch, memory=0.0)

    return step


def _be_silent() -> None:
    """What matters of a trial goes to the worker: warnings of strategies that are not used would only confuse."""
    logging.getLogger().addHandler(logging.NullHandler())
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def _line(error: Exception) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__
    return reason if len(reason) <= 300 else f"{reason[:300]} …"
