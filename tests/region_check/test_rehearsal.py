"""The rehearsal on real workers: what the lowering of training does wrong is refused before anything is trained."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from harness import run_ranks
from hyper_parallel import shard
from hyper_parallel.compat import collectives
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.region_check import rehearsal
from hyper_parallel.strategy import Strategy


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.drop = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(x)))
        return x


RIGHT = collectives.reduce_scatter


def _doubled(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    return 2 * RIGHT(x, group, size)


def _raises(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    raise RuntimeError("no\nkernel")


FAULTS = {"": RIGHT, "doubled": _doubled, "raises": _raises}


def _called(rank: int, world: int, cache: str, fault: str, axes: dict[str, int], times: int) -> list[str]:
    os.environ["XDG_CACHE_HOME"] = cache
    found = []
    for _ in range(times):
        model = Layers()
        # FSDP2 is given the function when the model, or its copy, is parallelized.
        with mock.patch("hyper_parallel.compat.fsdp.collectives.reduce_scatter", FAULTS[fault]):
            shard.parallelize(model, Strategy(axes=axes))
            with mock.patch.object(rehearsal, "_wrong", side_effect=rehearsal._wrong) as wrong:
                try:
                    with shard.sharded(model).micro_batch(seed=0, step=0, rows=torch.arange(4) + 4 * rank):
                        model(torch.randn(4, 8)).sum()
                    found.append(f"trained, {model.calls} call, {wrong.call_count} rehearsed")
                except StrategyError as error:
                    found.append(str(error))
    return found


@pytest.mark.parametrize("axes", [{"shard": 2}, {"replicate": 2}])
def test_what_is_right_is_rehearsed_once(axes: dict[str, int], tmp_path: Path) -> None:
    found = run_ranks(_called, 2, str(tmp_path), "", axes, 2)
    assert found == [["trained, 1 call, 1 rehearsed", "trained, 1 call, 0 rehearsed"]] * 2


def test_other_gradients_are_refused_by_every_rank(tmp_path: Path) -> None:
    for (line,) in run_ranks(_called, 2, str(tmp_path), "doubled", {"shard": 2}, 1):
        assert "this strategy on Layers gives other gradients than one device: layers." in line


def test_a_failure_is_refused_in_one_line(tmp_path: Path) -> None:
    for (line,) in run_ranks(_called, 2, str(tmp_path), "raises", {"shard": 2}, 1):
        assert "this strategy on Layers fails with RuntimeError: no kernel (strategy.check" in line
