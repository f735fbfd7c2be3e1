"""Worker entry of `hyper-parallel generate` on several workers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from hyper_parallel.config.generate import GenerateRun
from hyper_parallel.inference.batch import Batch
from hyper_parallel.inference.generator import Generator
from hyper_parallel.inference.prompt_file import prompt_of
from hyper_parallel.inference.request import Completion, Request
from hyper_parallel.inference.workers.split_requests import run_split
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
