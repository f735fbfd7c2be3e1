"""Every schedule computes the same bits: all ranks in one process, a thread each, with values handed over in memory."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.families import FAMILIES
from harness.pipelines import Captured, Tensors, run_in_threads
from hyper_parallel.graph.stage_graph import Partition
from hyper_parallel.program.build import Schedule
from hyper_parallel.program.instruction_loop import Turns, together
from hyper_parallel.runtime.rank_transfers import MemoryTransfers
from hyper_parallel.runtime.stage_runner import StageRunner
from hyper_parallel.schedule import Costs, ScheduleName, auto_schedule, named_schedule, with_steady_pairs

MICRO = 8


@functools.cache
def _deep() -> Captured:
    """A Llama of eight layers, with tied weights."""
    return Captured({**FAMILIES["llama-tied"], "num_hidden_layers": 8}, count=MICRO)


@functools.cache
def _whole() -> Tensors:
    return _deep().whole()


def _run(schedule: Schedule) -> tuple[Tensors, Partition]:
    return run_in_threads(_deep(), schedule)


def test_what_goes_back_is_sent_before_the_gradients_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    weight, send = StageRunner.weight, MemoryTransfers.send

    def noted_weight(self: StageRunner, micro_batch: int) -> None:
        if self.stage.number == 1:
            done.append(f"weights {micro_batch}")
        weight(self, micro_batch)

    def noted_send(self: MemoryTransfers, key: Any, target: int, value: Tensor) -> None:
        if target == 0:
            done.append(f"send {key[1]}")
        send(self, key, target, value)

    monkeypatch.setattr(StageRunner, "weight", noted_weight)
    monkeypatch.setattr(MemoryTransfers, "send", noted_send)
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


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-h2", "dualpipev"])
def test_schedules_with_pairs_have_the_same_bits(name: str) -> None:
    schedule = with_steady_pairs(named_schedule(name, 2, MICRO, paired=True))
    assert all(schedule.pairs)
    made, cut = _run(schedule)
    assert all(torch.equal(made[key], _whole()[key]) for key in _whole() if key not in cut.shared)


def test_a_pairs_tasks_take_turns_and_what_is_left_ends_one_after_the_other() -> None:
    ran: list[str] = []

    def task(name: str, stops: int) -> Turns[Tensor]:
        for at in range(stops):
            ran.append(f"{name}{at}")
            yield
        ran.append(f"{name} ends")
        return {name: torch.zeros(1)}

    made = together([task("a", 2), task("b", 3)], (0, 1, 1, 0, 1))
    assert ran == ["a0", "b0", "b1", "a1", "b2", "a ends", "b ends"]
    assert [list(one) for one in made] == [["a"], ["b"]]
    ran.clear()
    together([task("a", 0), task("b", 1)], itertools.cycle((0, 1)))
    assert ran == ["a ends", "b0", "b ends"]


def test_a_schedule_made_for_uneven_stages_has_them_too() -> None:
    uneven = (1.0, 2.0, 1.0, 3.0)
    costs = Costs(forward=uneven, backward=tuple(2 * one for one in uneven), input=uneven, weight=uneven)
    made, cut = _run(auto_schedule(costs, 4, MICRO).schedule)
    assert all(torch.equal(made[key], _whole()[key]) for key in _whole() if key not in cut.shared)
