"""Every schedule computes the same bits: all ranks in one process, a thread each, with values handed over in memory."""

from __future__ import annotations

import functools
import queue
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.pipelines import Captured, Tensors, even_cut
from hyper_parallel.graph.gradient_sums import GRADIENT
from hyper_parallel.graph.partition import by_modules
from hyper_parallel.graph.stage_graph import Partition, partition
from hyper_parallel.layout import Mesh
from hyper_parallel.program import DeviceGroup
from hyper_parallel.runtime.build_program import pipeline_program
from hyper_parallel.runtime.interpreter import Interpreter
from hyper_parallel.runtime.stage_runner import StageRunner
from hyper_parallel.schedule import Costs, ScheduleName, auto_schedule, named_schedule
from hyper_parallel.schedule.schedule import Schedule
from hyper_parallel.verify.families import FAMILIES

MICRO = 8
WAIT_S = 60.0


class _Memory:
    """Transfers between threads: a queue for each channel, first in, first out."""

    def __init__(self, rank: int, channels: dict[tuple[int, int], queue.Queue[Tensor]]) -> None:
        self._rank, self._channels = rank, channels
        self._posted: dict[int, list[Hashable]] = {}
        self._arrived: dict[Hashable, Tensor] = {}
        self._sent: dict[Hashable, Tensor] = {}

    def post(self, key: Hashable, source: int, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self._posted.setdefault(source, []).append(key)

    def send(self, key: Hashable, target: int, value: Tensor) -> None:
        self._sent[key] = value
        self._channels[self._rank, target].put(value.clone())

    def wait(self, key: Hashable) -> Tensor:
        if key in self._sent:
            return self._sent.pop(key)
        (source,) = [source for source, keys in self._posted.items() if key in keys] or [None]
        while key not in self._arrived:
            assert source is not None, f"{key} was not posted"
            # The first that was posted is the first that comes.
            first = self._posted[source].pop(0)
            self._arrived[first] = self._channels[source, self._rank].get(timeout=WAIT_S)
        return self._arrived.pop(key)

    def drain(self) -> None:
        self._sent.clear()


@functools.cache
def _deep() -> Captured:
    """A Llama of eight layers, with tied weights."""
    return Captured({**FAMILIES["llama-tied"], "num_hidden_layers": 8}, count=MICRO)


@functools.cache
def _whole() -> Tensors:
    return _deep().whole()


def _run(schedule: Schedule) -> tuple[Tensors, Partition]:
    found = _deep()
    cut = partition(
        found.step, by_modules(even_cut(found.model, schedule.stages, "model.layers")), schedule.stages
    )
    groups = [DeviceGroup(Mesh(("shard", 1)), (at,), f"rank {at}") for at in range(schedule.ranks)]
    program = pipeline_program(cut, schedule, groups)
    channels: Any = {(a, b): queue.Queue() for a in range(schedule.ranks) for b in range(schedule.ranks)}
    runs = [Interpreter(program, cut, found.state, at, _Memory(at, channels)) for at in range(schedule.ranks)]
    with ThreadPoolExecutor(schedule.ranks) as pool:
        values = [future.result() for future in [pool.submit(one.run, found.batches) for one in runs]]
    made: Tensors = {}
    for one in values:
        for name, value in [*((GRADIENT + n, v) for n, v in one.gradients.items()), *one.totals.items()]:
            made[name] = made[name] + value if name in made else value
    return made, cut


def test_what_goes_back_is_sent_before_the_gradients_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    weight, send = StageRunner.weight, _Memory.send

    def noted_weight(self: StageRunner, micro_batch: int) -> None:
        if self.stage.number == 1:
            done.append(f"weights {micro_batch}")
        weight(self, micro_batch)

    def noted_send(self: _Memory, key: Any, target: int, value: Tensor) -> None:
        if target == 0:
            done.append(f"send {key[1]}")
        send(self, key, target, value)

    monkeypatch.setattr(StageRunner, "weight", noted_weight)
    monkeypatch.setattr(_Memory, "send", noted_send)
    _run(named_schedule("1f1b", 2, MICRO))
    assert done == [f"{what} {at}" for at in range(MICRO) for what in ("send", "weights")]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", list(ScheduleName))
def test_every_schedule_has_the_same_bits(name: ScheduleName, ranks: int) -> None:
    made, cut = _run(named_schedule(name, ranks, MICRO))
    whole = _whole()
    assert made.keys() == whole.keys()
    assert all(torch.equal(made[key], whole[key]) for key in whole if key not in cut.shared)
    for key in cut.shared:
        torch.testing.assert_close(made[key], whole[key], rtol=1e-5, atol=1e-6)


def test_a_schedule_made_for_uneven_stages_has_them_too() -> None:
    uneven = (1.0, 2.0, 1.0, 3.0)
    costs = Costs(forward=uneven, backward=tuple(2 * one for one in uneven), input=uneven, weight=uneven)
    made, cut = _run(auto_schedule(costs, 4, MICRO).schedule)
    assert all(torch.equal(made[key], _whole()[key]) for key in _whole() if key not in cut.shared)
