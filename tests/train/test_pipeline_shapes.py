"""Plans of a pipeline by the shape of the batch: made once each, as long as they are among those used last."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hyper_parallel.config.train import LossConfig
from hyper_parallel.step.batches import MicroBatch
from hyper_parallel.step.pipeline_build import MOST_SHAPES, BuiltPipeline
from hyper_parallel.step.pipeline_plan import StepShape


class _Counted(BuiltPipeline):
    """Notes each shape that is planned."""

    def __init__(self) -> None:
        self.made: list[tuple[bool, int]] = []
        self.forgotten: list[Any] = []

        def planned(trains: bool, shape: StepShape) -> Any:
            self.made.append((trains, shape.length))
            return SimpleNamespace()

        planner: Any = SimpleNamespace(
            place=SimpleNamespace(groups=[SimpleNamespace(ranks=[0])]),
            training=lambda shape, like: planned(True, shape),
            evaluation=lambda like, shape, loss: planned(False, shape),
        )
        super().__init__(planner, SimpleNamespace(), StepShape(1, 4, 3, False), LossConfig())  # type: ignore[arg-type]
        self.handle: Any = SimpleNamespace(rank=0)
        self.runner: Any = SimpleNamespace(
            train=lambda counts, batch, tokens: tokens,
            evaluate=lambda counts, micro: torch.zeros(()),
            forget=self.forgotten.extend,
        )

    def lengths(self, *lengths: int) -> None:
        """Train on rows of these lengths."""
        for length in lengths:
            rows = torch.zeros(1, length, dtype=torch.int64)
            micro = [MicroBatch(rows, rows, rows, torch.arange(1))] * 2
            self.train(SimpleNamespace(micro=micro), torch.ones(()))  # type: ignore[arg-type]


def test_the_shape_that_was_not_used_for_longest_is_planned_anew(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = _Counted()
    pipeline.lengths(*range(MOST_SHAPES), *range(MOST_SHAPES))
    assert pipeline.made == [(True, length) for length in range(MOST_SHAPES)]
    pipeline.lengths(0)
    with caplog.at_level(logging.WARNING):
        pipeline.lengths(MOST_SHAPES)
    assert "pad rows to few lengths" in caplog.text
    # In place of length 1; length 0 had been used since.
    pipeline.lengths(0, MOST_SHAPES)
    assert len(pipeline.made) == MOST_SHAPES + 1
    pipeline.lengths(1)
    assert pipeline.made[-1] == (True, 1)
    assert caplog.text.count("pad rows to few lengths") == 1
    # What the runner keeps for them goes with them.
    assert len(pipeline.forgotten) == 2


def test_training_and_evaluation_have_plans_apart() -> None:
    pipeline = _Counted()
    pipeline.lengths(4)
    rows = torch.zeros(1, 4, dtype=torch.int64)
    micro = [MicroBatch(rows, rows, rows, torch.arange(1))] * 2
    pipeline.evaluate(micro)
    pipeline.evaluate(micro, documents=True)
    # One plan takes any number of micro-batches.
    pipeline.evaluate([*micro, *micro])
    assert pipeline.made == [(True, 4), (False, 4), (False, 4)]
