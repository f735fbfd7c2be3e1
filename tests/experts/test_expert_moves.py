"""Experts that move between steps, on real workers: weights, moments and gradients stay those of one device."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from moe import Step, assert_same_step, filled, step, whole

from harness import run_ranks
from hyper_parallel.config.train import AdamWConfig
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard import sharded
from hyper_parallel.step.expert_balance import ExpertBalancer
from hyper_parallel.step.optimizer import AdamW, build_optimizer
from hyper_parallel.strategy import Strategy

BALANCE = {"every": 2, "limit": 1.02, "replicas": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "shard 4 expert 4": ("mixtral", {"axes": {"shard": 4, "expert": 4}}),
    # Two ranks share the storage of each expert rank's experts: they move within and across.
    "shard 4 expert 2": ("gpt-oss", {"axes": {"shard": 4, "expert": 2}}),
    "shard 2 tensor 2 expert 4": ("deepseek-v3", {"axes": {"shard": 2, "tensor": 2, "expert": 4}}),
    "shard 2 tensor 2 expert 2 features recompute": (
        "mixtral",
        {
            "axes": {"shard": 2, "tensor": 2, "expert": 2},
            "rules": {"*.experts": "expert_tensor"},
            "memory": {"recompute": "layer"},
        },
    ),
}
RATE = 0.3
"""Of an update that is linear in the gradient, so that rounding is not magnified."""


def _values(model: torch.nn.Module, optimizer: AdamW) -> dict[str, torch.Tensor]:
    handle = sharded(model)
    found = {p.name: whole(handle.gather(p.local, p.layout)) for p in handle.parameters()}
    moments = optimizer.pieces().items()
    return found | {name: whole(handle.gather(piece.local, piece.layout)) for name, piece in moments}


def _two_steps(model: torch.nn.Module, strategy: Strategy) -> dict[str, Any]:
    """Two steps with an update between them, and experts placed anew after it where the strategy asks for that."""
    handle, optimizer = sharded(model), build_optimizer(model, AdamWConfig())
    assert isinstance(optimizer, AdamW)
    balancer = ExpertBalancer.of(handle, optimizer)
    first = step(model, strategy)
    pieces = optimizer.pieces()
    for one in handle.parameters():
        if one.grad is not None:
            # Moments that are not alike for all experts.
            pieces[f"optimizer.exp_avg.{one.name}"].local.copy_(one.grad)
            one.local.sub_(RATE * one.grad)
    model.zero_grad(set_to_none=True)
    values, placed = _values(model, optimizer), None
    if balancer is not None:
        assert balancer.after_step((first.loads / 2).tolist()) is None
        placed = balancer.after_step((first.loads / 2).tolist())
        moved = _values(model, optimizer)
        assert all(torch.equal(values[name], value) for name, value in moved.items())
        assert handle.orders
    return {"first": first, "second": step(model, strategy), "placed": placed}


@functools.cache
def _one_device(family: str) -> dict[str, Any]:
    return _two_steps(filled(family, Strategy()), Strategy())


def _rank(rank: int, world: int, name: str) -> list[dict[str, Any]]:
    family, declared = CASES[name]
    strategy = Strategy(**declared, expert_balance=BALANCE, check=False)
    return [_two_steps(filled(family, strategy, how), strategy) for how in ("fsdp", "traceable")]


@pytest.mark.parametrize("name", CASES)
def test_gradients_stay_those_of_one_device_when_experts_move(name: str) -> None:
    expected = _one_device(CASES[name][0])
    for found in run_ranks(_rank, 4, name):
        for got in found:
            assert_same_step(got["first"], expected["first"])
            assert_same_step(got["second"], expected["second"])
            placed = got["placed"]
            assert placed.after < placed.before and placed.experts > 0 and placed.moved > 0


def _resumed(rank: int, world: int) -> tuple[Any, Step, Step]:
    strategy = Strategy(axes={"shard": 2, "expert": 2}, expert_balance=BALANCE, check=False)
    model, other = filled("mixtral", strategy), filled("mixtral", strategy)
    first, second = (ExpertBalancer.of(sharded(m), build_optimizer(m, AdamWConfig())) for m in (model, other))
    assert first is not None and second is not None
    loads = step(model, strategy).loads.tolist()
    model.zero_grad(set_to_none=True)
    first.after_step(loads), first.after_step(loads), first.after_step(loads)
    state = first.state()
    second.load_state(state)
    assert second.state() == state and state["steps"] == 1
    for bad in ({**state, "order": {}}, {**state, "replicas": {key: [99] for key in state["order"]}}, {}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            second.load_state(bad)
    second.load_state({**state, "ranks": 4})
    return state, step(model, strategy), step(other, strategy)


def test_a_resumed_run_has_experts_where_they_were() -> None:
    for state, model, other in run_ranks(_resumed, 2):
        assert any(order != sorted(order) for order in state["order"].values())
        assert all(torch.equal(model.gradients[name], one) for name, one in other.gradients.items())


class _Stale(AdamW):
    """Keeps the layouts of the beginning."""

    def pieces(self) -> Any:
        self._first = getattr(self, "_first", None) or super().pieces()
        return self._first


def _stale(rank: int, world: int) -> str:
    strategy = Strategy(axes={"shard": 2, "expert": 2}, expert_balance={**BALANCE, "every": 1}, check=False)
    model = filled("mixtral", strategy)
    handle = sharded(model)
    balancer = ExpertBalancer.of(handle, _Stale(handle.parameters(), AdamWConfig()))
    assert balancer is not None
    with pytest.raises(StrategyError) as refused:
        balancer.after_step(step(model, strategy).loads.tolist())
    return str(refused.value)


def test_an_optimizer_that_keeps_old_layouts_is_refused() -> None:
    assert all("ShardedParameter.layout" in said for said in run_ranks(_stale, 2))


def _own_loop(rank: int, world: int) -> bool:
    strategy = Strategy(axes={"shard": 2, "expert": 2}, expert_balance=BALANCE, check=False)
    model = filled("mixtral", strategy)
    balancer = ExpertBalancer.of(sharded(model), build_optimizer(model, AdamWConfig()))
    assert balancer is not None
    ids = torch.randint(0, 131, (4, 16), generator=torch.Generator().manual_seed(rank))
    placed = []
    for _ in range(2):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)
        placed.append(balancer.after_step())
    assert placed[0] is None and str(placed[1]).startswith(
        "experts placed anew: the heaviest rank's rows from 1."
    )
    return bool(sharded(model).orders)


def test_a_loop_of_ones_own_calls_the_balancer() -> None:
    assert run_ranks(_own_loop, 2) == [True, True]
