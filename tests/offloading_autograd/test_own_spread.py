"""`hp.offload` on spread modules of the user's own: the graph that ranks run, and ranks whose code differs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyper_parallel as hp
from harness import run_ranks
from hyper_parallel.errors import CaptureError, StrategyError
from hyper_parallel.graph.ir import is_collective
from hyper_parallel.offloading.autograd import plan_cache
from hyper_parallel.strategy import Strategy


class _Chosen(nn.Module):
    """Two layers, and one of two more that a setting chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.chosen = 2

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 1, self.chosen):
            x = torch.tanh(self.layers[index](x))
        return x

    def first(self, x: Tensor) -> Tensor:
        return self.layers[0](x)  # type: ignore[no-any-return]


def _spread(**axes: int) -> Any:
    torch.manual_seed(0)
    return hp.parallelize(_Chosen(), Strategy(axes=axes, check=False), lowering="traceable")


def _collectives(rank: int, world: int) -> list[str]:
    """The collectives and products of a step, in order, with their modules."""
    captured: list[Any] = []
    capture = plan_cache.capture_passes

    def seen(*args: Any) -> Any:
        captured.append(capture(*args))
        return captured[-1]

    plan_cache.capture_passes = seen
    model = hp.offload(_spread(shard=2), budget="1MiB", host="1MiB")
    model(torch.ones(2, 8)).sum().backward()
    hp.release(model)
    found = []
    for node in captured[0].step.nodes:
        kind = str(node.target).split(".")[1]
        if is_collective(node) and "gather" in kind and len(node.meta["value"].shape) == 2:
            found.append(f"gather {node.meta['module']}")
        elif kind == "addmm":
            found.append(f"forward {node.meta['module']}")
        elif is_collective(node) and "reduce" in kind and len(node.meta["value"].shape) == 2:
            found.append("reduce")
        elif kind == "tanh_backward":
            found.append("backward")
    return found


def test_weights_are_gathered_at_their_first_use_and_gradients_reduced_at_once() -> None:
    for found in run_ranks(_collectives, 2):
        forward = [f"{what} layers.{index}" for index in (0, 1, 2) for what in ("gather", "forward")]
        assert found[:6] == forward
        # The first layer's gradient needs no weight; that of the input is not asked for.
        assert found[6:] == [
            *("backward", "gather layers.2", "reduce"),
            *("backward", "gather layers.1", "reduce"),
            *("backward", "reduce"),
        ]


def _differ(rank: int, world: int) -> list[str]:
    logging.getLogger("hyper_parallel").setLevel(logging.ERROR)
    said = []
    for axes in ({"shard": 2}, {"replicate": 2}):
        model = hp.offload(_spread(**axes), budget="1MiB", host="1MiB")
        model(torch.ones(2, 8)).sum().backward()
        model.chosen = 2 + rank
        with pytest.raises(CaptureError) as raised:
            model(torch.ones(2, 8))
        said.append(str(raised.value))
        model.chosen = 3
        model(torch.ones(2, 8)).sum().backward()
        hp.release(model)
    return said


def test_ranks_whose_code_uses_other_weights_are_refused_on_all_of_them() -> None:
    for said in run_ranks(_differ, 2):
        assert all("the code of _Chosen computes with other weights" in line for line in said)


def _parts(rank: int, world: int) -> str:
    model = _spread(shard=2)
    with pytest.raises(StrategyError) as raised:
        model.first(torch.ones(2, 8))
    return str(raised.value)


def test_a_part_that_is_called_by_itself_is_refused() -> None:
    for said in run_ranks(_parts, 2):
        assert said.startswith("'layers.0' of _Chosen is called outside of the model's forward pass")
