"""Layers over two tensor axes give one device's gradients: in double precision, and for every family."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from harness import run_ranks
from hyper_parallel import shard
from hyper_parallel.compat.collectives import counting
from hyper_parallel.compat.local_tensor import on_rank, one_device, per_rank, simulated_ranks
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard import memory
from hyper_parallel.strategy import Strategy
from shard.families import FAMILIES, Step, build, one_device_step, simulated_step, step

# As verify/report.py says, float32 sums in another order are within 1e-5 of a gradient's largest element.
TOLERANCE = 1e-5
# The same in double precision: 2e-16 an addition, with a factor for the sums' length.
DOUBLE = 1e-12

_SHAPE: dict[str, Any] = {
    "vocab_size": 136,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
}
# LayerNorm and torch's RMSNorm stay in double precision; the families' RMSNorm casts to float32.
WIDE: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SHAPE, "intermediate_size": 224, "num_key_value_heads": 4,
              "attention_bias": True, "mlp_bias": True},
    "llama, one head, odd": {"model_type": "llama", **_SHAPE, "intermediate_size": 101, "num_key_value_heads": 1},
    "phi3": {"model_type": "phi3", **_SHAPE, "intermediate_size": 224, "num_key_value_heads": 4, "pad_token_id": 5},
    "gpt2": {"model_type": "gpt2", "vocab_size": 136, "n_embd": 64, "n_layer": 2, "n_head": 16, "n_positions": 64},
    "gpt2, dropout": {"model_type": "gpt2", "vocab_size": 136, "n_embd": 64, "n_layer": 2, "n_head": 16,
                      "n_positions": 64, "attn_pdrop": 0.0},
}  # fmt: skip


def _model(family: str) -> torch.nn.Module:
    fields = dict(WIDE[family])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with one_device(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        model.train(family.endswith("dropout"))
        for module in list(model.modules()):
            for name, child in module.named_children():
                if type(child).__name__.endswith("RMSNorm"):
                    setattr(module, name, torch.nn.RMSNorm(64, eps=1e-6))
                elif name == "act" and model.training:  # dropout where features and positions are split
                    module.act = torch.nn.Sequential(child, torch.nn.Dropout(0.2))
    return model


def _gradients(family: str, strategy: Strategy, lowering: Any = "traceable") -> dict[str, torch.Tensor]:
    """Gradients of a weighted sum of the logits, whole."""
    model = _model(family)
    shard.parallelize(model, strategy, lowering=lowering)
    shard.init_weights(model, seed=1)
    with one_device():
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 136, (2, 16), generator=generator)
        weight = torch.randn(2, 16, 136, generator=generator, dtype=torch.float64)
    ids, weight = per_rank(lambda rank: ids), per_rank(lambda rank: weight)
    rows = per_rank(lambda rank: torch.arange(2))
    handle = shard.sharded(model)
    with handle.micro_batch(seed=3, step=7, rows=rows):
        (model(input_ids=ids, use_cache=False).logits * weight).sum().backward()
    whole = {p.name: handle.gather(p.grad, p.layout) for p in handle.parameters() if p.grad is not None}
    with one_device():
        return {name: on_rank(gradient, 0).clone() for name, gradient in whole.items()}


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (memory, importlib.import_module("hyper_parallel.shard.parallelize")):
        monkeypatch.setattr(module, "dtype", lambda name: torch.float64)


@functools.cache
def _expected_in_double(family: str) -> dict[str, torch.Tensor]:
    """One device's gradients, for tests in double precision alone."""
    return _gradients(family, Strategy())


def _assert_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert got.keys() == expected.keys()
    norm = float(torch.stack([g.norm() for g in expected.values()]).norm())
    for name, gradient in expected.items():
        scale = max(float(gradient.abs().max()), 1e-4 * norm)
        worst = float((got[name] - gradient).abs().max()) / scale
        assert worst <= tolerance, f"gradient of {name} is off by {worst:.1e}"


FACTORS = {
    "y 2 x 2": {"tensor_y": 2, "tensor_x": 2},
    "x 2 y 2": {"tensor_x": 2, "tensor_y": 2},
    "y 4 x 2": {"tensor_y": 4, "tensor_x": 2},
    "x 4 y 2": {"tensor_x": 4, "tensor_y": 2},
    "y 4 x 4": {"tensor_y": 4, "tensor_x": 4},
    "x 8 y 2": {"tensor_x": 8, "tensor_y": 2},
    "y 8 x 2": {"tensor_y": 8, "tensor_x": 2},
}
WIDE_SAMPLE = {
    ("llama", "y 4 x 4"),
    ("llama, one head, odd", "y 4 x 2"),
    ("phi3", "x 4 y 2"),
    ("gpt2", "x 2 y 2"),
    ("gpt2, dropout", "y 4 x 4"),
}


@pytest.mark.parametrize("gathered", ["keep", "again"])
@pytest.mark.parametrize(
    ("family", "factors"),
    [
        pytest.param(f, n, marks=[] if (f, n) in WIDE_SAMPLE else [pytest.mark.matrix])
        for f in WIDE
        for n in FACTORS
    ],
)
def test_gradients_in_double_precision(double: None, family: str, factors: str, gathered: str) -> None:
    expected = _expected_in_double(family)
    strategy = Strategy(axes=FACTORS[factors], memory={"gathered": gathered})
    with simulated_ranks(strategy.axes.world):
        got = _gradients(family, strategy)
    _assert_close(got, expected, DOUBLE)


STRATEGIES: dict[str, dict[str, Any]] = {
    "y 2 x 2": {"axes": {"tensor_y": 2, "tensor_x": 2}},
    "x 2 shard 2 y 2 again": {
        "axes": {"tensor_x": 2, "shard": 2, "tensor_y": 2},
        "memory": {"gathered": "again", "recompute": "layer"},
    },
}
SAMPLE = {("gpt2-dropout", "y 2 x 2"), ("gemma3", "y 2 x 2"), ("phi3", "x 2 shard 2 y 2 again")}
SAMPLE |= {("mixtral", "y 2 x 2"), ("deepseek-v3", "y 2 x 2"), ("qwen3", "x 2 shard 2 y 2 again")}
expected_step = functools.cache(one_device_step)


def _assert_same_step(got: Step, expected: Step) -> None:
    assert got.loss == pytest.approx(expected.loss, abs=2e-6)
    assert got.norm == pytest.approx(expected.norm, rel=1e-5)
    _assert_close(got.gradients, expected.gradients, TOLERANCE)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(f, n, marks=[] if (f, n) in SAMPLE else [pytest.mark.matrix])
        for f in FAMILIES
        for n in STRATEGIES
    ],
)
def test_every_family(family: str, name: str) -> None:
    _assert_same_step(simulated_step(family, Strategy(**STRATEGIES[name])), expected_step(family))


def _rank(rank: int, world: int, family: str, declared: dict[str, Any]) -> Step:
    strategy = Strategy(**declared, check=False)
    model = build(family)
    shard.parallelize(model, strategy)
    shard.init_weights(model, seed=1)
    return step(model, strategy)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_workers_over_gloo(family: str) -> None:
    declared = {"axes": {"tensor_x": 2, "tensor_y": 2}, "memory": {"gathered": "again"}}
    for got in run_ranks(_rank, 4, family, declared):
        _assert_same_step(got, expected_step(family))


@pytest.mark.matrix
def test_eight_workers_with_fsdp() -> None:
    declared = {"axes": {"shard": 2, "tensor_y": 2, "tensor_x": 2}}
    for got in run_ranks(_rank, 8, "llama-tied", declared):
        _assert_same_step(got, expected_step("llama-tied"))


def test_gathering_again_is_one_gather_more_for_each_product_group() -> None:
    def gathers(strategy: Strategy) -> int:
        with simulated_ranks(4), counting() as counted:
            _gradients("gpt2", strategy)
        return sum(c.kind == "all_gather" for c in counted)

    for axes in ({"tensor_y": 2, "tensor_x": 2}, {"tensor": 4}):
        kept, mlp, again = (
            gathers(Strategy(axes=axes, sequence=True, memory={"gathered": how}))
            for how in ("keep", "mlp", "again")
        )
        # In each of two layers: the inputs of q, k, v and of o; that of the MLP over the digit of x, then over y.
        two_layers = {1: (1 * 2, 2 * 2), 2: (2 * 2, 4 * 2)}[len(axes)]
        assert (mlp - kept, again - kept) == two_layers


def test_weights_lie_as_their_products_are_split() -> None:
    model = build(
        "llama", hidden_size=64, num_attention_heads=16, num_key_value_heads=4, intermediate_size=224
    )
    strategy = Strategy(axes={"tensor_y": 4, "tensor_x": 4})
    with simulated_ranks(16):
        shard.parallelize(model, strategy, lowering="traceable")
        layouts = {p.name: str(p.layout).replace("/context", "") for p in shard.sharded(model).parameters()}
    layer = "model.layers.0."
    # MLP: x′ = x″ = 2 of tensor_x's 4, so that y′ = y″ is tensor_y and the inner digit of tensor_x.
    assert layouts[f"{layer}self_attn.q_proj.weight"] == "[64/tensor_y, 64/tensor_x]"
    assert layouts[f"{layer}self_attn.o_proj.weight"] == "[64/tensor_x, 64/tensor_y]"
    assert layouts[f"{layer}mlp.up_proj.weight"] == "[224/tensor_y*tensor_x_2_1, 64/tensor_x_2_2]"
    assert layouts[f"{layer}mlp.down_proj.weight"] == "[64/tensor_x_2_2, 224/tensor_y*tensor_x_2_1]"
    assert layouts[f"{layer}input_layernorm.weight"] == "[64/tensor_x]"


def _refused(family: str, axes: dict[str, int], length: int = 16, **overrides: Any) -> None:
    strategy = Strategy(axes=axes)
    with simulated_ranks(strategy.axes.world):
        model = build(family, **overrides)
        shard.parallelize(model, strategy, lowering="traceable")
        shard.init_weights(model, seed=1)
        with one_device():
            ids = torch.zeros(1, length, dtype=torch.int64)
        model(input_ids=per_rank(lambda rank: ids), use_cache=False)


def test_refusals() -> None:
    with pytest.raises(StrategyError, match="does not divide the hidden size 36"):
        _refused("qwen3", {"tensor_x": 8, "tensor_y": 2}, hidden_size=36, num_attention_heads=16)
    with pytest.raises(StrategyError, match=r"15 positions over tensor_y · tensor_x = 4.*pad"):
        _refused("llama", {"tensor_x": 2, "tensor_y": 2}, length=15)
    with pytest.raises(StrategyError, match=r"memory\.gathered: again is for inputs gathered"):
        shard.parallelize(build("llama"), Strategy(memory={"gathered": "again"}))
