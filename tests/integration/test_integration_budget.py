"""Budgets under a Trainer: the losses of one process, rows of few lengths, and what is refused."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from trainer_cases import Case, as_torchrun, trainer_of

from harness import run_ranks
from hyper_parallel.errors import BudgetError, IntegrationError
from hyper_parallel.integration.batch_rows import MOST, length_of
from hyper_parallel.integration.memory_budget import check_budget
from hyper_parallel.offloading.autograd import Swap
from hyper_parallel.strategy import Memory

STEPS = 2
ARGUMENTS = {"max_steps": STEPS, "eval_strategy": "no"}
ONCE = {**ARGUMENTS, "gradient_accumulation_steps": 1}
NEAR = 1e-4
"""Sums in other orders in fp32, over the updates of AdamW."""


@dataclass(frozen=True)
class Told:
    """What a run's log says, and what its plans say."""

    losses: list[float]
    notes: list[str]
    lengths: list[int]


def _run(rank: int, world: int, runs: dict[str, tuple[Case, dict[str, Any]]]) -> dict[str, Told]:
    as_torchrun(rank, world)
    found = {}
    for name, (case, more) in runs.items():
        with tempfile.TemporaryDirectory() as folder:
            trainer = trainer_of(case, folder, **more)
            trainer.pop_callback(transformers.PrinterCallback)
            trainer.train()
        budget = getattr(trainer, "_budget", None)
        found[name] = Told(
            [one["loss"] for one in trainer.state.log_history if "loss" in one],
            [] if budget is None else list(trainer.model.forward.notes),
            [] if budget is None else list(trainer._lengths.known),
        )
    return found


def _plain(arguments: dict[str, Any]) -> Told:
    return _run(0, 1, {"plain": (Case(None, arguments=arguments), {})})["plain"]


def _within(axes: dict[str, int], device: str, arguments: dict[str, Any] = ARGUMENTS) -> Case:
    return Case({"axes": axes, "memory": {"device": device, "host": "16MiB"}}, arguments=arguments)


def test_a_budget_leaves_the_losses_of_one_process() -> None:
    plain = _plain(ONCE)
    ours, other = run_ranks(_run, 2, {"shard": (_within({"shard": 2}, "70KB", ONCE), {})})
    assert ours["shard"].losses == pytest.approx(plain.losses, abs=NEAR)
    assert len(ours["shard"].losses) == STEPS
    assert ours["shard"].lengths == other["shard"].lengths
    assert all("of 68.4 KiB" in note for note in ours["shard"].notes)


@pytest.mark.matrix
def test_other_axes_and_swapped_activations() -> None:
    runs = {
        "tensor": (_within({"tensor": 2}, "70KB"), {}),
        "context": (_within({"context": 2}, "70KB"), {}),
        "swap": (Case({"axes": {"shard": 2}}, arguments=ARGUMENTS), {"swap": Swap(inputs=False)}),
    }
    plain = _plain(ARGUMENTS)
    for told in run_ranks(_run, 2, runs):
        for name, one in told.items():
            assert one.losses == pytest.approx(plain.losses, abs=NEAR), name
            assert one.notes


def _refused(rank: int, world: int) -> str:
    as_torchrun(rank, world)
    with tempfile.TemporaryDirectory() as folder, pytest.raises(BudgetError) as refused:
        trainer_of(_within({"shard": 2}, "10KB"), folder).train()
    return str(refused.value)


@pytest.mark.matrix
def test_a_budget_that_is_too_small_is_told_by_its_keys() -> None:
    one, other = run_ranks(_refused, 2)
    least = [re.search(r"all workers need (\S+ KiB) at least; set it higher", said) for said in (one, other)]
    assert least[0] is not None
    assert least[1] is not None
    assert least[0][1] == least[1][1]
    assert "memory.device: the budget of 9.8 KiB" in one


def test_rows_have_few_lengths() -> None:
    known: list[int] = []
    generator = torch.Generator().manual_seed(0)
    for wanted in [37, *torch.randint(16, 2049, (1000,), generator=generator).tolist()]:
        found = length_of(wanted, known, 4)
        assert found >= wanted
        assert found % 4 == 0
        if found not in known:
            known.append(found)
    assert known[0] == 40
    assert length_of(40, known, 4) == 40
    assert len(known) <= MOST + 2
    assert length_of(700, [700]) == 700
    assert [length_of(n, [10_000]) for n in (5, 6, 7, 97, 128, 129)] == [6, 6, 8, 128, 128, 192]
    assert length_of(3, [100 * at for at in range(1, MOST + 1)]) == 100


def test_what_a_budget_under_a_trainer_cannot_honour_is_refused() -> None:
    check_budget(Memory(device=1, host=1))
    with pytest.raises(IntegrationError, match="keep one of them"):
        check_budget(Memory(device=1, host=1), Swap())
    with pytest.raises(IntegrationError, match=r"memory\.pool"):
        check_budget(Memory(device=1, pool=1))
    with pytest.raises(IntegrationError, match=r"memory\.update"):
        check_budget(Memory(device=1, host=1, update="host"))
