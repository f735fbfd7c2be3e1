"""Targets of runs with a fault in the middle of a pipeline's schedule."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.config import RunConfig
from hyper_parallel.launch import Worker
from hyper_parallel.runtime.interpreter import Interpreter
from hyper_parallel.step import train_step
from hyper_parallel.step.batches import StepBatch
from hyper_parallel.step.pipeline_build import BuiltPipeline
from hyper_parallel.train.trainer import Trainer

VARIABLE = "HYPER_PARALLEL_TEST_FAULT"


@dataclass(frozen=True)
class Fault:
    """What happens on a rank when it comes to an instruction."""

    kind: str
    """``kill``, ``stop``, ``hang``, ``raise``, ``memory``, ``lose`` (what is sent next), ``signal``, ``nan`` (the loss
    of the rank), ``infinite`` (a gradient of the rank)."""
    rank: int
    step: int = 0
    """Counted from 1."""
    instruction: str = ""
    """How its position begins. ``nan`` and ``infinite`` come with the batch of the step, whenever that is."""
    number: int = 0
    """Of ``signal``."""

    def environment(self) -> dict[str, str]:
        """The variable by which workers know of it."""
        return {VARIABLE: json.dumps(asdict(self))}


class _Sent:
    """A send of which nothing arrives."""

    def wait(self, timeout: object = None) -> bool:
        return True


def main(config: RunConfig, worker: Worker) -> None:
    """Train, with the fault that the environment declares."""
    fault = Fault(**json.loads(os.environ[VARIABLE]))
    if worker.rank == fault.rank:
        if fault.kind in ("nan", "infinite"):
            _poison(fault)
        else:
            _strike(fault)
    Trainer(config).run(worker)


def _strike(fault: Fault) -> None:
    step, train, do = 0, BuiltPipeline.train, Interpreter._do
    acts: Mapping[str, Callable[[], object]] = {
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "hang": lambda: time.sleep(600),
        "raise": lambda: _raise(ValueError("the defect")),
        "memory": lambda: torch.empty(1 << 50, dtype=torch.uint8),
        "signal": lambda: os.kill(os.getpid(), fault.number),
        "lose": lambda: setattr(dist, "isend", lambda *a, **k: _Sent()),
    }

    def counted(self: BuiltPipeline, batch: StepBatch, tokens: Tensor) -> Tensor:
        nonlocal step
        step = batch.step + 1
        return train(self, batch, tokens)

    def struck(self: Interpreter, one: Any, batches: Any) -> None:
        at = self.positions[self._instructions.index(one)].text
        if step == fault.step and at.startswith(fault.instruction):
            acts[fault.kind]()
        do(self, one, batches)

    BuiltPipeline.train = counted  # type: ignore[method-assign]
    Interpreter._do = struck  # type: ignore[method-assign]


def _raise(error: Exception) -> None:
    raise error


def _poison(fault: Fault) -> None:
    train, eagerly = BuiltPipeline.train, train_step.Stepper._eagerly
    rows: list[int] = []

    def poisoned(loss: Tensor, batch: StepBatch, model: Any) -> Tensor:
        if not rows and batch.step + 1 == fault.step:
            rows.extend(batch.rows)
        if batch.rows != rows:
            return loss
        if fault.kind == "infinite":
            gradient = next(p.grad for p in model.parameters() if p.grad is not None)
            gradient.view(-1)[0] = float("inf")
            return loss
        return loss * float("nan")

    def staged(self: BuiltPipeline, batch: StepBatch, tokens: Tensor) -> Tensor:
        return poisoned(train(self, batch, tokens), batch, self.handle.model)

    def alone(self: Any, batch: StepBatch, tokens: Tensor) -> Tensor:
        return poisoned(eagerly(self, batch, tokens), batch, self._recipe.model)

    BuiltPipeline.train = staged  # type: ignore[method-assign]
    train_step.Stepper._eagerly = alone  # type: ignore[method-assign]
