"""Worker entry of `hyper-parallel generate` on several workers: requests split over replicas, answers to rank 0."""

from __future__ import annotations

import heapq
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from hyper_parallel.compat import process_groups
from hyper_parallel.config.generate import GenerateRun
from hyper_parallel.config.inference import Inference
from hyper_parallel.inference.batch import Batch, Deliver, prompt_of
from hyper_parallel.inference.generator import Generator
from hyper_parallel.inference.request import Completion, Request
from hyper_parallel.launch import Worker, stop
from hyper_parallel.launch.heartbeat import pulse

TARGET = f"{__name__}:main"
"""The target that `launch.run` calls on every rank."""


def main(config: GenerateRun, worker: Worker) -> None:
    """Generate as one of the workers: rank 0 reads the prompts and writes the answers."""
    # What has been written is whole at any moment, so that a stop request ends the worker at once.
    with stop.interruptible():
        leads, settings = worker.rank == 0, config.inference
        batch = None
        if leads and config.source is not None and config.answers is not None:
            batch = Batch(Path(config.folder), Path(config.source), Path(config.answers), settings)
        if not _from_rank_0(batch is None or batch.missing, worker):
            if batch is not None:
                batch.end()
            return
        with pulse.operation("loading the model"):
            generator = Generator(
                Path(config.folder), strategy=config.effective_strategy, **settings.model_dump()
            )
        with generator:
            requests: list[Request] = []
            if batch is not None:
                requests = batch.requests(generator)
            elif leads:
                ids = generator.ids_of(prompt_of(config.prompt, config.chat), settings=settings)
                requests = [generator.request(ids, settings, sample) for sample in range(settings.n)]
            requests = _from_rank_0(requests, worker)
            if batch is not None:
                with batch.writing(generator.moved) as deliver:
                    run_split(generator, requests, settings, deliver, worker.rank)
                batch.end(generator.unused_tiers)
            else:
                _print_answers(generator, requests, config, worker)


def _print_answers(
    generator: Generator, requests: list[Request], config: GenerateRun, worker: Worker
) -> None:
    answers: dict[int, Completion] = {}

    def deliver(place: int, answer: Completion, shared: int) -> None:
        answers[place] = answer

    run_split(generator, requests, config.inference, deliver, worker.rank)
    for place in sorted(answers):
        sys.stdout.write(answers[place].text + "\n")


Value = TypeVar("Value")


def _from_rank_0(value: Value, worker: Worker) -> Value:
    """The value of rank 0, on every rank."""
    found = [value]
    dist.broadcast_object_list(found, src=0, device=worker.device)
    return found[0]


# Requests split over replicas, whose answers come to rank 0 as they are ready.
#
# Each replica generates its part and waits for no other: answers travel through the key-value store of the process
# group, which rank 0 reads between its own passes.

_POLL_S = 0.05
"""Between looks for answers of other replicas, when there is nothing else to do."""
_LOOK_S = 0.2
"""Between looks while passes are computed."""
_COUNT = itertools.count()
"""Of runs in this process: the same on every rank."""


def split(requests: Sequence[Request], replicas: int) -> list[list[int]]:
    """Places of the requests of each replica, in order: the longest first, each to the replica with the fewest tokens
    (longest processing time first, Graham 1969). Answers to one prompt stay together, which share its pages, where
    there are enough prompts."""
    units: dict[tuple[int, int], list[int]] = {}
    together = len({one.row for one in requests}) >= replicas
    for place, one in enumerate(requests):
        units.setdefault((one.row, 0 if together else one.sample), []).append(place)
    costs = [
        (sum(len(requests[place].ids) + requests[place].sampling.max_tokens for place in unit), unit)
        for unit in units.values()
    ]
    loads = [(0, index) for index in range(replicas)]
    found: list[list[int]] = [[] for _ in range(replicas)]
    for cost, unit in sorted(costs, key=lambda pair: -pair[0]):
        load, index = heapq.heappop(loads)
        found[index] += unit
        heapq.heappush(loads, (load + cost, index))
    return [sorted(part) for part in found]


def run_split(
    generator: Generator, requests: Sequence[Request], settings: Inference, deliver: Deliver, rank: int
) -> None:
    """Generate all requests, the same on every rank, each on one replica. Rank 0 is given every answer (`deliver`), the
    others none. A collective; returns on every rank when rank 0 has all answers."""
    replica, run = generator.replica, f"hyper_parallel/generate/{next(_COUNT)}"
    own = split(requests, replica.count)[replica.index]
    sent = 0
    left = len(requests)
    taken = {index: 0 for index in range(replica.count) if index != replica.index}
    shared = dict.fromkeys(range(replica.count), 0)
    looked = 0.0

    def look() -> None:
        """Take the answers that have come, on rank 0."""
        nonlocal left
        for index in taken:
            while (text := process_groups.taken_word(f"{run}/{index}/{taken[index]}")) is not None:
                taken[index] += 1
                left -= 1
                found = json.loads(text)
                shared[index] = found["shared"]
                deliver(found["place"], Completion(**found["answer"]), sum(shared.values()))

    @contextmanager
    def around() -> Iterator[None]:
        nonlocal looked
        with pulse.step(generator.passes + 1):
            yield
        if rank == 0 and taken and time.monotonic() - looked > _LOOK_S:
            looked = time.monotonic()
            look()

    with generator.around_passes(around):
        for number, answer in generator.run([requests[place] for place in own], settings):
            place = own[number]
            if rank == 0:
                left -= 1
                shared[replica.index] = generator.shared
                deliver(place, answer, sum(shared.values()))
            elif replica.leads and replica.index:
                message = {"place": place, "answer": asdict(answer), "shared": generator.shared}
                process_groups.leave_word(f"{run}/{replica.index}/{sent}", json.dumps(message))
                sent += 1
    if rank == 0:
        while left:
            _pause()
            look()
        process_groups.leave_word(f"{run}/finished", "")
        return
    while not process_groups.is_left(f"{run}/finished"):
        _pause()


def _pause() -> None:
    # Every look is progress for the watchdog: a replica that hangs is found by its own heartbeats.
    with pulse.operation("waiting for other replicas"):
        time.sleep(_POLL_S)
