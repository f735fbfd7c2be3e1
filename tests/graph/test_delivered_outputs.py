"""Outputs that a graph delivers when they are computed, and those that it returns at its end."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hyper_parallel.compat.fx_graph import fake_mode_with_symbols
from hyper_parallel.graph import StepGraph, capture, executable


def _captured(step: Callable[[Tensor], dict[str, Tensor]]) -> StepGraph:
    with fake_mode_with_symbols():
        x = torch.empty(3)
        return capture(lambda: step(x), {"x": ("input", x)})


def _run(step: StepGraph) -> tuple[dict[str, Tensor], dict[str, tuple[int, Tensor]]]:
    """What is returned, and what is delivered, with the number of nodes that had run."""
    ran = 0
    delivered: dict[str, tuple[int, Tensor]] = {}

    def stamp() -> None:
        nonlocal ran
        ran += 1

    def deliver(name: str, value: Tensor) -> None:
        delivered[name] = (ran, value.clone())

    run = executable(step, stamp, deliver=("gradient.", deliver))
    returned = run.run({"x": torch.arange(3.0)})
    assert returned.keys() == set(run.outputs)
    return returned, delivered


def test_each_output_with_the_prefix_is_delivered_behind_its_last_use() -> None:
    def step(x: Tensor) -> dict[str, Tensor]:
        first = x * 2
        second = first + 1
        third = second * 3
        first.add_(10)
        return {"loss": third.sum(), "gradient.first": first, "gradient.second": second}

    returned, delivered = _run(_captured(step))
    x = torch.arange(3.0)
    assert torch.equal(returned["loss"], ((2 * x + 1) * 3).sum())
    assert returned.keys() == {"loss"}
    (at_first, first), (at_second, second) = delivered["gradient.first"], delivered["gradient.second"]
    assert torch.equal(first, 2 * x + 10)
    assert torch.equal(second, 2 * x + 1)
    assert at_second < at_first, "the second is done with before the first is changed"


def test_outputs_that_share_memory_or_are_inputs_are_returned() -> None:
    def step(x: Tensor) -> dict[str, Tensor]:
        whole = x * 2
        return {"gradient.whole": whole, "gradient.part": whole[1:], "gradient.x": x}

    returned, delivered = _run(_captured(step))
    assert returned.keys() == {"gradient.whole", "gradient.part", "gradient.x"}
    assert not delivered
    assert torch.equal(returned["gradient.part"], torch.tensor([2.0, 4.0]))
