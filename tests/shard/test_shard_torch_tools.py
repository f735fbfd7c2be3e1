"""PyTorch's own optimizer and clipping, in a loop that knows nothing of HyperParallel, see the right thing."""

from __future__ import annotations

import functools

import pytest
import torch
from families import STRATEGIES, batch, build, loss_of

from harness import run_ranks
from hyper_parallel import shard
from hyper_parallel.strategy import Strategy


def _two_steps(rank: int, world: int, name: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    strategy = Strategy(**STRATEGIES[name], check=False) if name else Strategy()
    model = shard.parallelize(build("llama"), strategy)
    shard.init_weights(model, seed=1)
    handle, optimizer = shard.sharded(model), torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    whole = batch()
    mine = {key: x.chunk(strategy.axes.data)[handle.data_index] for key, x in whole.items()}
    norms = []
    for _ in range(2):
        loss_of(model, mine, int((whole["labels"] != -100).sum())).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {p.name: handle.gather(p.local, p.layout) for p in handle.parameters()}


@functools.cache
def _one_device() -> tuple[list[float], dict[str, torch.Tensor]]:
    return _two_steps(0, 1, None)


@pytest.mark.parametrize("name", ["tensor 2", "shard 2", "shard 2 tensor 2", "replicate 2 shard 2"])
def test_torchs_optimizer_and_clipping(name: str) -> None:
    expected_norms, expected = _one_device()
    for norms, values in run_ranks(_two_steps, Strategy(**STRATEGIES[name]).axes.world, name):
        assert norms == pytest.approx(expected_norms, rel=1e-4)
        for key, value in expected.items():
            torch.testing.assert_close(values[key], value, rtol=0, atol=2e-6)
