"""Forward passes without a backward pass in a loop: what comes after them sees the weights of now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import hyper_parallel as hp
from harness import run_ranks

NEAR = 2e-6
STEPS = 3


def _llama() -> nn.Module:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))


class _Plain(nn.Module):
    """A module of the user's own, with the same call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up, self.down = nn.Embedding(64, 16), nn.Linear(16, 32), nn.Linear(32, 64)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.embed(rows))))


def _loss(model: Any, rows: Tensor) -> Tensor:
    logits = model(rows) if isinstance(model, _Plain) else model(input_ids=rows, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())


def _evaluate(model: nn.Module, rows: Tensor) -> None:
    with torch.no_grad():
        _loss(model, rows)


def _evaluated_before_the_step(model: nn.Module, rows: Tensor, optimizer: torch.optim.Optimizer) -> None:
    _evaluate(model, rows)
    optimizer.step()
    optimizer.zero_grad()


def _evaluated_before_zero_grad(model: nn.Module, rows: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    _evaluate(model, rows)
    model.zero_grad()


def _a_pass_thrown_away(model: nn.Module, rows: Tensor, optimizer: torch.optim.Optimizer) -> None:
    _loss(model, rows)
    optimizer.step()
    optimizer.zero_grad()


ENDS: dict[str, Callable[..., None]] = {
    "evaluated before the step": _evaluated_before_the_step,
    "evaluated before zero_grad": _evaluated_before_zero_grad,
    "a pass thrown away": _a_pass_thrown_away,
}


def _losses(rank: int, world: int, strategies: dict[str, dict[str, Any] | None]) -> dict[Any, list[float]]:
    """By model, strategy and end of a step: the losses of the whole batch."""
    return {
        (make.__name__, name, end): _run(make(), strategy, ENDS[end])
        for make in (_llama, _Plain)
        for name, strategy in strategies.items()
        for end in ENDS
    }


def _run(model: nn.Module, strategy: dict[str, Any] | None, end: Callable[..., None]) -> list[float]:
    rows = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(1))
    handle, parts = None, 1
    if strategy is not None:
        hp.parallelize(model, hp.Strategy(**strategy, check=False))
        handle = hp.sharded(model)
        parts = handle.strategy.axes.data
        rows = rows.chunk(parts)[handle.data_index]
    # Fused, which does not raise the versions of DTensors.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for _ in range(STEPS):
        part = _loss(model, rows) / parts
        part.backward()
        end(model, rows, optimizer)
        total = part.detach() if handle is None else handle.all_reduce(part.detach(), ("replicate", "shard"))
        losses.append(float(total))
    return losses


def test_a_pass_without_a_backward_pass_leaves_no_weights_of_before_an_update() -> None:
    strategies: dict[str, Any] = {
        "shard": {"axes": {"shard": 2}},
        "replicate": {"axes": {"replicate": 2}},
        "gradients": {"axes": {"shard": 2}, "memory": {"shard": "gradients"}},
    }
    right = run_ranks(_losses, 1, {"one": None})[0]
    for (model, name, end), losses in run_ranks(_losses, 2, strategies)[0].items():
        assert losses == pytest.approx(right[model, "one", end], abs=NEAR), (model, name, end)
