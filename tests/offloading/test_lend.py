"""State that is away is there where a model's own code reads it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from hyper_parallel.compat import memory
from hyper_parallel.offloading.paging import lend


class _Router(nn.Module):
    bias: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0))
        self.register_buffer("bias", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class _Layer(nn.Module):
    """Reads a buffer of another module, as DeepSeek-V3's does."""

    def __init__(self) -> None:
        super().__init__()
        self.router = _Router()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.router.weight.untyped_storage().nbytes() == 0  # only there for the router itself
        assert self.router.bias.untyped_storage().nbytes()
        return self.router(x) + self.router.bias


@pytest.fixture
def layer() -> Iterator[_Layer]:
    """With all of its state away."""
    layer = _Layer()
    kept = [tensor.detach() for tensor in layer.state_dict().values()]
    for tensor in kept:
        _put_away(tensor)
    try:
        yield layer
    finally:
        for tensor in kept:
            memory.forget(tensor)


def _put_away(tensor: torch.Tensor) -> None:
    storage, values = tensor.untyped_storage(), tensor.clone()

    @contextlib.contextmanager
    def bring(known: torch.Tensor, changed: bool) -> Iterator[None]:
        storage.resize_(values.untyped_storage().nbytes())
        tensor.copy_(values)
        try:
            yield
        finally:
            storage.resize_(0)

    memory.keep(tensor, bring)
    storage.resize_(0)


@torch.no_grad()
def test_a_modules_parameters_and_everybodys_buffers_are_there_while_it_runs(layer: _Layer) -> None:
    lend(layer)
    assert layer(torch.full((4,), 2.0)).tolist() == [1.0, 3.0, 5.0, 7.0]
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in layer.state_dict().values())
