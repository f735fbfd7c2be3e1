"""What is predicted is what runs: a rank issues the operators, transfers and waits of its Program's expansion."""

from __future__ import annotations

import functools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from torch import Tensor

from harness.families import FAMILIES
from harness.pipelines import Captured, StepRun, Tensors, run_in_threads
from harness.programs import chain, random_schedule
from hyper_parallel.compat.dispatch import kernel
from hyper_parallel.graph import execute
from hyper_parallel.graph.operator_costs import NOTHING
from hyper_parallel.graph.stage_graph import Partition
from hyper_parallel.program import Program, expand
from hyper_parallel.runtime import interpreter
from hyper_parallel.runtime.rank_transfers import MemoryTransfers
from hyper_parallel.runtime.stage_costs import sum_bytes
from hyper_parallel.runtime.stage_ops import stage_ops
from hyper_parallel.runtime.stage_runner import StageRunner
from hyper_parallel.schedule import Schedule, ScheduleName, named_schedule, with_steady_pairs

MICRO = 4
_here = threading.local()


@functools.cache
def _captured(family: str) -> Captured:
    layers = {"num_hidden_layers": 8 if family.startswith("llama") else 4}
    return Captured({**FAMILIES[family], **layers}, count=MICRO)


def _issued() -> list[str]:
    """What the rank of this thread has issued."""
    if not hasattr(_here, "issued"):
        _here.issued = []
    found: list[str] = _here.issued
    return found


@pytest.fixture
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have graphs and stage runners note what they do."""
    add, own = StageRunner._add, StageRunner._own

    def noted(target: Any) -> Callable[..., Any]:
        runs = kernel(target)
        name = target.__name__.split(".")[0]
        name = (name if name.endswith("__") else name.removesuffix("_")).removesuffix("_for_cpu")

        def run(*args: Any, **kwargs: Any) -> Any:
            _issued().append(name)
            return runs(*args, **kwargs)

        return run

    def add_noted(self: StageRunner, name: str, value: Tensor) -> None:
        into = self.gradients if name.startswith("gradient.") else self.totals
        if name.removeprefix("gradient.") in into:
            _issued().append("add")
        elif name not in self._kept:
            _issued().append("copy")
        add(self, name, value)

    def own_noted(self: StageRunner, received: Tensors, name: str) -> Tensor:
        if name in self._changed:
            _issued().append("copy")
        return own(self, received, name)

    summed = interpreter.summed

    def summed_noted(parts: Iterable[Tensors]) -> Tensors:
        found = list(parts)
        names = Counter(name for one in found for name in one)
        _issued().extend(["add"] * sum(count - 1 for count in names.values()))
        return summed(found)

    monkeypatch.setattr(interpreter, "summed", summed_noted)
    monkeypatch.setattr(execute, "kernel", noted)
    monkeypatch.setattr(StageRunner, "_add", add_noted)
    monkeypatch.setattr(StageRunner, "_own", own_noted)


class _Transfers(MemoryTransfers):
    """Transfers that are noted."""

    def post(self, key: Any, *args: Any) -> Tensor:
        _issued().append(f"recv {key[0]}, micro-batch {key[1]}")
        return super().post(key, *args)

    def send(self, key: Any, *args: Any) -> None:
        _issued().append(f"send {key[0]}, micro-batch {key[1]}")
        super().send(key, *args)

    def wait(self, key: Any) -> Tensor:
        _issued().append(f"wait {key[0]}, micro-batch {key[1]}")
        return super().wait(key)


def _predicted(program: Program, cut: Partition, group: str) -> list[str]:
    stages = {stage.number: stage_ops(stage, views=True)[0] for stage in cut.stages}
    sizes = {
        one.name: sum_bytes([one]) for stage in cut.stages for one in (*stage.sends, *stage.gradients_out)
    }
    found = []
    for op in expand(program, stages, sizes=sizes).ops[group]:
        if op.collective is not None:
            found.append(f"{op.collective.kind} {op.collective.tag}")
        elif op.name.startswith("Wait("):
            found.append(f"wait {op.name.removeprefix('Wait(').partition(')')[0]}")
        elif op.work is not None:
            found.append(op.name)
    return found


def _compared(
    program: Program, cut: Partition, found: Captured, rank: int, transfers: MemoryTransfers
) -> Tensors:
    _here.issued = []
    noted = _Transfers(rank, transfers._channels, transfers._deadline)
    made = StepRun(program, cut, found.state, rank, noted).step(found.batches)
    predicted = _predicted(program, cut, f"rank {rank}")
    issued = [name for name in _issued() if name not in NOTHING]
    for at, (one, other) in enumerate(zip(issued, predicted, strict=False)):
        assert one == other, (rank, at, issued[at - 4 : at + 4], predicted[at - 4 : at + 4])
    assert len(issued) == len(predicted)
    assert sum(name.startswith(("send", "recv", "wait")) for name in issued) > 2 * MICRO
    return made


@pytest.mark.usefixtures("_recorded")
@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-v"])
def test_named_schedules(name: ScheduleName) -> None:
    run_in_threads(_captured("llama-tied"), named_schedule(name, 2, MICRO), _compared)


@pytest.mark.usefixtures("_recorded")
def test_pairs_of_passes() -> None:
    schedule = with_steady_pairs(named_schedule("1f1b", 2, MICRO, paired=True))
    run_in_threads(_captured("llama-tied"), schedule, _compared)


@pytest.mark.usefixtures("_recorded")
@pytest.mark.parametrize("seed", range(6))
def test_random_orders_and_placements(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.randint(2, 3)
    placement = [*range(ranks), *(draw.randrange(ranks) for _ in range(draw.randint(0, 1)))]
    draw.shuffle(placement)
    schedule: Schedule = random_schedule(draw, placement, ranks, MICRO, chain(len(placement)))
    family = draw.choice(["llama-tied", "mixtral"])
    run_in_threads(_captured(family), schedule, _compared)
