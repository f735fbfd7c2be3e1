"""Loads, the auxiliary loss and the bias correction do not depend on the axes, and are what is published."""

from __future__ import annotations

import pytest
import torch
from moe import batch, build, filled, one_device_step, simulated_step

from hyper_parallel import shard
from hyper_parallel.shard.experts.loads import has_biases
from hyper_parallel.strategy import Strategy


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "gpt-oss"])
def test_auxiliary_loss_is_transformers_own(family: str) -> None:
    model = filled(family, Strategy(), output_router_logits=True, router_aux_loss_coef=0.03)
    ids = batch()["input_ids"]
    output = model(input_ids=ids, use_cache=False)
    ours = shard.sharded(model).auxiliary_loss()
    assert float(output.aux_loss.detach()) > 1
    torch.testing.assert_close(ours, 0.03 * output.aux_loss, rtol=1e-6, atol=0)
    router = next(p for n, p in model.named_parameters() if n.endswith((".gate.weight", ".router.weight")))
    (expected,) = torch.autograd.grad(0.03 * output.aux_loss, router, retain_graph=True)
    (got,) = torch.autograd.grad(ours, router)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-8)


def test_no_auxiliary_loss_unless_the_config_asks() -> None:
    model = filled("mixtral", Strategy())
    model(input_ids=batch()["input_ids"], use_cache=False)
    assert float(shard.sharded(model).auxiliary_loss()) == 0


def test_loads_count_every_row_of_the_batch_once() -> None:
    got = one_device_step("mixtral")
    assert got.loads.shape == (16,)
    assert float(got.loads[:8].sum()) == float(got.loads[8:].sum()) == 8 * 16 * 3
    assert got.imbalance == float((got.loads.view(2, 8).max(1).values / 48).max())


@pytest.mark.parametrize(
    "strategy",
    [
        {"axes": {"shard": 2, "tensor": 2, "expert": 4}},
        {"axes": {"tensor": 4, "expert": 2}, "memory": {"recompute": "layer"}},
    ],
)
def test_corrected_biases_are_those_of_one_device(strategy: dict[str, object]) -> None:
    rate = 0.01
    expected = one_device_step("deepseek-v3", bias_rate=rate)
    got = simulated_step("deepseek-v3", Strategy(**strategy), micro_batches=2, bias_rate=rate)  # type: ignore[arg-type]
    assert torch.equal(got.loads, expected.loads)
    (bias,) = expected.biases.values()
    load = expected.loads
    assert load.max() > load.mean() > load.min()
    torch.testing.assert_close(bias, torch.linspace(-0.1, 0.1, 8) + rate * (load.mean() - load).sign())
    assert torch.equal(next(iter(got.biases.values())), bias)


def test_evaluation_is_not_counted() -> None:
    from hyper_parallel.shard.experts.loads import loads

    model = filled("mixtral", Strategy())
    with torch.no_grad():
        model(input_ids=batch()["input_ids"], use_cache=False)
    assert not loads(shard.sharded(model)).any()


def test_which_models_have_biases() -> None:
    assert has_biases(build("deepseek-v3"))
    assert not has_biases(build("mixtral"))
