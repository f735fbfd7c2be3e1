"""`hp.offload` on spread models: every loss, gradient, value and load beside the same ranks without a budget."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tiny import Observer, model_of
from torch import nn

import hyper_parallel as hp
from harness import run_ranks
from hyper_parallel.compat.fake_tensors import is_fake
from hyper_parallel.errors import BudgetError, FollowsError, TierError
from hyper_parallel.offloading import autograd
from hyper_parallel.shard import sharded
from hyper_parallel.shard.loss import causal_lm_loss
from hyper_parallel.strategy import Strategy

LENGTH, ROWS, MICRO = 32, 2, 2
SHARE = 0.6
"""Of what a rank holds without a budget: its budget."""


@dataclass(frozen=True)
class Case:
    strategy: dict[str, Any]
    family: str = "llama"
    settings: dict[str, Any] = field(default_factory=dict)
    adam: bool = False
    """Else SGD, which keeps nothing."""


TWO = {"shard": Case({"axes": {"shard": 2}})}
MORE_OF_TWO = {
    "moments": Case({"axes": {"shard": 2}}, adam=True),
    "tensor": Case({"axes": {"tensor": 2}}),
    "context": Case({"axes": {"context": 2}}),
    "gathered once": Case({"axes": {"shard": 2}, "memory": {"shard": "gradients"}}),
    "reduced once": Case({"axes": {"shard": 2}, "memory": {"shard": "optimizer"}}),
    "replicate": Case({"axes": {"replicate": 2}}),
    "recompute": Case({"axes": {"shard": 2}, "memory": {"recompute": "layer"}}),
    "dropout": Case({"axes": {"shard": 2}}, "gpt2"),
    "swap": Case({"axes": {"shard": 2}}),
    "expert": Case(
        {"axes": {"shard": 2, "expert": 2}, "memory": {"expert_load": 1.0}},
        "mixtral",
        {"output_router_logits": True},
    ),
}
FOUR = {
    "shard and tensor": Case({"axes": {"shard": 2, "tensor": 2}, "sequence": True}),
    "replicate and shard": Case({"axes": {"replicate": 2, "shard": 2}}, adam=True),
    "experts": Case({"axes": {"shard": 4, "expert": 2}}, "mixtral"),
}


class Seen(Observer):
    """Looks past the tensors without memory by which passes are captured."""

    def _see(self, tensors: Sequence[Any]) -> None:
        super()._see([x for x in tensors if not (isinstance(x, torch.Tensor) and is_fake(x))])


@dataclass
class Ran:
    values: list[torch.Tensor] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    """Of each micro-batch's two passes for which no plan was made: then the host's memory, which on a processor is seen
    too, is moved."""


def _spread(case: Case, lowering: Any = "traceable") -> nn.Module:
    model = model_of(case.family, **case.settings)
    return hp.parallelize(model, Strategy.model_validate({"version": 1, **case.strategy}), lowering=lowering)


def _loss(model: nn.Module, step: int = 0, micro: int = 0) -> torch.Tensor:
    """Of rows that are this rank's share; those of the second share hold two documents in each second micro-batch."""
    index = sharded(model).data_index
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + index)
    ids = torch.randint(64, (ROWS, LENGTH), generator=generator)
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    positions = torch.arange(LENGTH).repeat(ROWS, 1)
    if micro and index == 1:
        positions[:, 20:] -= 20
    tokens = float(ROWS * MICRO * (LENGTH - 1) * 2)
    return causal_lm_loss(model, ids, labels, positions, tokens, micro_batches=MICRO)


def _trained(model: nn.Module, adam: bool) -> Ran:
    handle, ran, plans = sharded(model), Ran(), 0
    kind = torch.optim.AdamW if adam else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=1e-2)
    rows = torch.arange(ROWS) + ROWS * handle.data_index
    for step in range(3 if adam else 2):
        for micro in range(MICRO):
            held = [*model.parameters(), *model.buffers(), *handle.gathers.contents.values()]
            held += [p.grad for p in model.parameters() if p.grad is not None]
            held += [x for state in optimizer.state.values() for x in state.values()]
            with (
                handle.micro_batch(seed=1, step=step, rows=rows, last=micro == MICRO - 1),
                Seen(held) as seen,
            ):
                loss = _loss(model, step, micro)
                loss.backward()
            after = len(getattr(model.forward, "notes", ()))
            if after == plans:
                ran.peaks.append(seen.peak)
            plans = after
            ran.values.append(loss.detach())
            del loss, held
        ran.values += [p.grad.clone() for p in model.parameters()]
        ran.values += list(handle.routing.counts.values()) if handle.routing is not None else []
        optimizer.step()
        optimizer.zero_grad()
    ran.values += [p.detach().clone() for p in model.parameters()]
    return ran


def _compared(rank: int, world: int, cases: dict[str, Case]) -> dict[str, str]:
    """What is wrong with each case; nothing where it is right."""
    # As tests/offloading_autograd/conftest.py has it.
    importlib.import_module("hyper_parallel.offloading.schedule.solve").WORK = 0  # type: ignore[attr-defined]
    importlib.import_module("hyper_parallel.offloading.schedule.graph_search").PLANS = 1  # type: ignore[attr-defined]
    wrong = {}
    for name, case in cases.items():
        free, model = _trained(_spread(case), case.adam), _spread(case)
        budget: Any = autograd.Swap() if name == "swap" else int(SHARE * max(free.peaks))
        hp.offload(model, budget=budget, host="16MiB")
        moved = _trained(model, case.adam)
        same = len(moved.values) == len(free.values) and all(map(torch.equal, moved.values, free.values))
        most = max(free.peaks) if name == "swap" else budget
        grew = case.strategy.get("memory", {}).get("expert_load") and model.forward._plans.load == 1.0
        if not same or max(moved.peaks, default=most + 1) > most or grew:
            wrong[name] = f"same: {same}, {moved.peaks} of {budget}, free {free.peaks}, {model.forward.notes}"
        autograd.release(model)
    return wrong


def _quick_on_two(rank: int, world: int) -> tuple[dict[str, str], list[str]]:
    return _compared(rank, world, TWO), [*_fails_on_one(rank), *_fails_on_all()]


def _fails_on_one(rank: int) -> list[str]:
    """Rank 1 alone has no memory beside the device, and then no plan: all ranks raise, and go on."""
    model = _spread(TWO["shard"])
    said = []
    missing = "/proc/nowhere" if rank else None
    with pytest.raises(TierError if rank else FollowsError) as opened:
        hp.offload(model, budget="200KB", host="16MiB", flash=missing)
    said.append(str(opened.value))
    hp.offload(model, budget="200KB", host="1KiB" if rank else "16MiB")
    with pytest.raises(BudgetError if rank else FollowsError) as refused:
        _loss(model).backward()
    said.append(str(refused.value))
    autograd.release(model)
    _loss(model).backward()
    return said


def _fails_on_all() -> list[str]:
    with pytest.raises(BudgetError) as refused:
        hp.offload(_spread(TWO["shard"], "fsdp"), budget="1MiB", host="1MiB")
    said = [str(refused.value)]
    model = hp.offload(_spread(TWO["shard"]), budget=1, host="1MiB")
    with pytest.raises(BudgetError) as floor:
        _loss(model)
    return [*said, str(floor.value.floor)]


def test_two_workers_have_the_same_bits_and_fail_together() -> None:
    (wrong, first), (wrong_too, second) = run_ranks(_quick_on_two, 2)
    assert not wrong, wrong
    assert not wrong_too, wrong_too
    assert all("another worker" in said for said in first[:2])
    assert "/proc/nowhere" in second[0]
    assert "at least" in second[1]
    assert all('lowering="traceable"' in said[2] for said in (first, second))
    assert first[3] == second[3]


@pytest.mark.matrix
@pytest.mark.parametrize("world", [2, 4])
def test_each_axis_has_the_same_bits(world: int) -> None:
    assert run_ranks(_compared, world, MORE_OF_TWO if world == 2 else FOUR, timeout=600) == [{}] * world


def test_one_device_that_a_strategy_names() -> None:
    model = hp.offload(_spread(Case({})), budget="220KB", host="16MiB")
    moved, free = _trained(model, False), _trained(_spread(Case({})), False)
    assert all(map(torch.equal, moved.values, free.values))
    assert max(moved.peaks) <= 220_000 < max(free.peaks)
