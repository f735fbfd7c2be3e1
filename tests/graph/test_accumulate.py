"""Steps of several micro-batches, cut from the captured step of one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hyper_parallel.compat.fake_process_group import fake_mode
from hyper_parallel.errors import GraphError
from hyper_parallel.graph import StepGraph, capture, executable, phase
from hyper_parallel.graph.accumulate import accumulation
from hyper_parallel.graph.ir import GivenTensor


def _step(*, peeks: bool) -> StepGraph:
    """Adds a batch's sum to a state; with `peeks` also its largest element, once a step."""
    with fake_mode():
        x, state = torch.empty(3), torch.empty(())

        def body() -> dict[str, Tensor]:
            found = (x * 2.0).sum()
            with phase("optimizer"):
                state.add_(found.view_as(found))
                if peeks:
                    state.add_(x.amax())
            return {"loss": found}

        return capture(body, {"x": GivenTensor("input", x), "state": GivenTensor("parameter", state)})


def test_what_runs_once_a_step_sees_the_sum_of_its_micro_batches() -> None:
    step = _step(peeks=False)
    cut = accumulation(step, {}, {"loss": step.returned["loss"]}, {"x"})
    state, total = torch.zeros(()), torch.zeros(())
    batches = [torch.tensor([float(at), 1.0, 2.0]) for at in range(4)]
    for at, batch in enumerate(batches):
        part = cut.last if at == len(batches) - 1 else cut.middle
        executable(part).run({"x": batch, "state": state, "loss": total})
    assert state == total == sum(2.0 * batch.sum() for batch in batches)


def test_what_runs_once_a_step_may_not_use_one_micro_batch_alone() -> None:
    step = _step(peeks=True)
    with pytest.raises(GraphError, match=r"amax.*uses values of one micro-batch"):
        accumulation(step, {}, {"loss": step.returned["loss"]}, {"x"})
