"""Epochs whose last batch is short, with every remainder: losses, norms and evaluations of one process's Trainer."""

from __future__ import annotations

from typing import Any

import pytest
from trainer_cases import BATCH, Case, as_torchrun, rows, trainer_of
from transformers import PrinterCallback

from harness import run_ranks

NEAR = 1e-5
COUNTS = range(BATCH + 1, 2 * BATCH + 1)
"""Rows of an epoch: two micro-batches of one process, the second with 1 to BATCH rows."""
ACCUMULATIONS = (1, 3)
ON_TWO = ({"shard": 2}, {"tensor": 2}, {"context": 2}, {"pipeline": 2})
ON_FOUR = ({"shard": 4}, {"shard": 2, "tensor": 2}, {"replicate": 2, "pipeline": 2})

Logged = dict[tuple[int, int], list[float]]


def _logged(rank: int, world: int, strategies: list[dict[str, int] | None]) -> dict[str, Logged]:
    """By axes, then by rows of an epoch and micro-batches of a step: what two epochs log."""
    as_torchrun(rank, world)
    return {str(axes): _runs(axes) for axes in strategies}


def _runs(axes: dict[str, int] | None) -> Logged:
    logged: Logged = {}
    for count in COUNTS:
        for accumulation in ACCUMULATIONS:
            arguments: dict[str, Any] = {
                "gradient_accumulation_steps": accumulation,
                "max_steps": -1,
                "num_train_epochs": 2,
                "eval_strategy": "epoch",
                "optim": "sgd",
                "lr_scheduler_type": "constant",
                "learning_rate": 0.1,
            }
            case = Case(None if axes is None else {"axes": axes}, arguments=arguments)
            trainer = trainer_of(case, "unused", train_dataset=rows(count), eval_dataset=rows(count))
            trainer.pop_callback(PrinterCallback)
            trainer.train()
            logged[count, accumulation] = [
                float(entry[key])
                for entry in trainer.state.log_history
                for key in ("loss", "grad_norm", "eval_loss")
                if key in entry
            ]
    return logged


@pytest.fixture(scope="module")
def plain() -> Logged:
    found: dict[str, Logged] = run_ranks(_logged, 1, [None])[0]
    return found["None"]


@pytest.mark.parametrize(("world", "strategies"), [(2, ON_TWO), (4, ON_FOUR)])
def test_last_batches_count_as_in_one_process(
    plain: Logged, world: int, strategies: tuple[dict[str, int], ...]
) -> None:
    assert all(len(values) >= 6 for values in plain.values())
    for axes, logged in run_ranks(_logged, world, list(strategies))[0].items():
        for run, values in plain.items():
            assert logged[run] == pytest.approx(values, abs=NEAR), (axes, run)
