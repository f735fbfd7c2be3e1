"""Plain modules with the user's own rules, and mixed precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import build, one_device_step, simulated_step, step
from torch import nn

from harness import run_ranks
from hyper_parallel import shard
from hyper_parallel.compat.local_tensor import each_rank, one_device, per_rank, simulated_ranks
from hyper_parallel.strategy import Strategy


class Residual(nn.Module):
    """What HyperShard must not assume: a residual inside, dropout between the projections, two pairs in one parent."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 12)
        self.up1, self.drop, self.down1 = nn.Linear(12, 20), nn.Dropout(0.25), nn.Linear(20, 12)
        self.up2, self.down2 = nn.Linear(12, 18, bias=False), nn.Linear(18, 12, bias=False)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.down1(self.drop(self.up1(x).relu()))
        x = x + self.down2(self.up2(self.norm(x)).sigmoid())
        return self.head(x)


RULES = {"embed": "vocab", "up*": "colwise", "down*": "rowwise", "head": "colwise_gather"}
IDS = torch.arange(24).reshape(4, 6) % 13


def plain_step(
    strategy: Strategy, lowering: str, made: type[nn.Module] = Residual
) -> tuple[float, dict[str, torch.Tensor]]:
    with one_device():
        torch.manual_seed(0)
        model = made()
    shard.parallelize(model, strategy, lowering=lowering)  # type: ignore[arg-type]
    handle = shard.sharded(model)
    data = strategy.axes.data

    def rows(rank: int) -> torch.Tensor:
        here = handle.mesh.coordinate(rank)
        return torch.arange(4).chunk(data)[here["replicate"] * handle.mesh.size("shard") + here["shard"]]

    ids = per_rank(lambda rank: IDS[rows(rank)])
    with handle.micro_batch(seed=1, step=2, rows=per_rank(rows)):
        loss = model(ids).square().sum()
        loss.backward()
    whole = {p.name: handle.gather(p.grad, p.layout) for p in handle.parameters() if p.grad is not None}
    total = handle.all_reduce(loss.detach(), ("replicate", "shard"))
    with one_device():
        return float(next(iter(each_rank(total).values()))), {
            name: next(iter(each_rank(tensor).values())).clone() for name, tensor in whole.items()
        }


def _rank(rank: int, world: int, strategy: Strategy) -> tuple[float, dict[str, torch.Tensor]]:
    return plain_step(strategy, "fsdp")


AXES = [
    {"tensor": 2},
    {"tensor": 3},
    {"shard": 2, "tensor": 2},
    {"replicate": 2, "tensor": 2},
    {"replicate": 2},
]


@pytest.mark.parametrize("axes", AXES)
def test_a_plain_module_under_the_user_s_rules(axes: dict[str, int]) -> None:
    expected_loss, expected = plain_step(Strategy(), "fsdp")
    strategy = Strategy(axes=axes, rules=RULES if "tensor" in axes else {})
    with simulated_ranks(strategy.axes.world):
        answers = [plain_step(strategy, "traceable")]
    answers += run_ranks(_rank, strategy.axes.world, strategy)
    for loss, gradients in answers:
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-5)


class Peeking(nn.Module):
    """Computes with the weight of a module below it, as Mamba's mixer does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.linear(x, self.inner.weight, self.inner.bias).tanh()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.layers = nn.ModuleList([Peeking(), Peeking()])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def _stack(rank: int, world: int, axes: dict[str, int]) -> dict[str, torch.Tensor]:
    return plain_step(Strategy(axes=axes), "fsdp", Stack)[1]


def test_a_module_may_compute_with_the_weights_of_those_below_it() -> None:
    _, expected = plain_step(Strategy(), "fsdp", Stack)
    with simulated_ranks(4):
        answers = [plain_step(Strategy(axes={"shard": 4}), "traceable", Stack)[1]]
    for gradients in answers + run_ranks(_stack, 4, {"shard": 4}):
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-5)


BF16: dict[str, Any] = {"compute": "bfloat16", "modules": {"*norm*": "float32"}}


def _bf16(rank: int, world: int, axes: dict[str, int]) -> Any:
    memory: dict[str, Any] = {"recompute": "layer"} if world > 2 else {}
    strategy = Strategy(axes=axes, precision=BF16, memory=memory, check=False)
    model = shard.parallelize(build("llama"), strategy)
    shard.init_weights(model, seed=1)
    seen: dict[str, torch.dtype] = {}
    model.model.norm.register_forward_hook(
        lambda m, args, out: seen.update(norm_in=args[0].dtype, norm_out=out.dtype)
    )
    model.model.layers[0].mlp.register_forward_hook(lambda m, args, out: seen.update(mlp=out.dtype))
    return step(model, strategy), seen, {p.local.dtype for p in shard.sharded(model).parameters()}


@pytest.mark.parametrize("axes", [{}, {"tensor": 2}, {"shard": 2}, {"replicate": 2, "shard": 2}])
def test_mixed_precision_by_module_on_any_strategy(axes: dict[str, int]) -> None:
    exact = one_device_step("llama")
    world = Strategy(axes=axes).axes.world
    for got, seen, stored in run_ranks(_bf16, world, axes):
        assert stored == {torch.float32}
        assert seen == {"norm_in": torch.bfloat16, "norm_out": torch.bfloat16, "mlp": torch.bfloat16}
        # bfloat16 keeps 8 bits: 2^-8 relative on what is summed.
        assert got.loss == pytest.approx(exact.loss, rel=4e-3)
        assert got.norm == pytest.approx(exact.norm, rel=2e-2)
        assert got.gradients["lm_head.weight"].dtype == torch.float32


def test_both_lowerings_agree_in_mixed_precision() -> None:
    strategy = Strategy(axes={"shard": 2}, precision={"compute": "bfloat16"})
    simulated = simulated_step("llama", strategy)
    for got in run_ranks(_lowered, 2, strategy):
        for name, gradient in simulated.gradients.items():
            torch.testing.assert_close(got.gradients[name], gradient, rtol=0, atol=1e-6)


def _lowered(rank: int, world: int, strategy: Strategy) -> Any:
    model = shard.parallelize(build("llama"), strategy)
    shard.init_weights(model, seed=1)
    return step(model, strategy)
