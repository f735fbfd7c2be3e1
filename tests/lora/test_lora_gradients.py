"""LoRA under every strategy, all ranks in one process, against one device: every adapter's gradient."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from harness.equivalence import STRATEGIES
from harness.families import WITH_EXPERTS
from hyper_parallel.strategy import Strategy
from lora.adapted import one_device_step, simulated_step
from shard.families import FAMILIES as MODELS
from shard.families import cells

# One of each kind: separate, fused and latent projections, Conv1D, experts, images. Others differ outside of them.
FAMILIES = ("llama", "qwen2", "phi3", "gpt2", "mixtral", "gpt-oss", "deepseek-v3", "qwen2.5-vl")
SAMPLE = {
    ("llama", "tensor 2"),
    ("llama", "tensor_x 2 tensor_y 2"),
    ("phi3", "tensor 4 sequence"),
    ("gpt2", "context 2 tensor 2"),
    ("qwen2", "replicate 2 shard 2"),
    ("deepseek-v3", "tensor 4 sequence"),
    ("qwen2.5-vl", "tensor 2 shard 2 sequence recompute"),
    ("mixtral", "shard 4 tensor 2 expert 4"),
}

expected_step = functools.cache(one_device_step)


def strategy_for(name: str, *, experts: bool) -> Strategy:
    """The strategy of a name, for a family with or without experts: `expert` says nothing where there are none."""
    declared = STRATEGIES[name]
    if not experts:
        declared = {**declared, "axes": {k: v for k, v in declared["axes"].items() if k != "expert"}}
    return Strategy(**declared)


def assert_same(family: str, strategy: str, **settings: Any) -> None:
    expected = one_device_step(family, **settings) if settings else expected_step(family)
    got = simulated_step(family, strategy_for(strategy, experts=family in WITH_EXPERTS), **settings)
    assert got.norm == pytest.approx(expected.norm, rel=1e-5)
    assert got.gradients.keys() == expected.gradients.keys()
    assert all("lora_" in name for name in got.gradients)
    assert all(gradient.any() for gradient in expected.gradients.values())
    for name, value in expected.values.items():
        assert torch.equal(got.values[name], value), f"initial values of {name} differ"
    for name, gradient in expected.gradients.items():
        scale = max(float(gradient.abs().max()), 1e-4 * expected.norm)
        worst = float((got.gradients[name] - gradient).abs().max()) / scale
        assert worst < 1e-5, f"gradient of {name} is off by {worst:.1e}"


# A pipeline is not laid by `parallelize`.
IN_ONE_GROUP = {name: one for name, one in STRATEGIES.items() if one["axes"].get("pipeline", 1) == 1}


@pytest.mark.parametrize(("family", "name"), cells(FAMILIES, IN_ONE_GROUP, SAMPLE))
def test_adapters_get_one_device_s_gradients(family: str, name: str) -> None:
    assert_same(family, name)


@pytest.mark.parametrize("name", ["tensor 4 sequence", "shard 2 context 2 tensor_x 2 tensor_y 2"])
def test_dropout_before_adapters_is_the_same(name: str) -> None:
    assert_same("llama", name, lora_dropout=0.3)


def test_an_adapter_of_the_head_and_one_with_a_bias() -> None:
    assert_same(
        "qwen2", "tensor 2 shard 2 sequence recompute", target_modules=["q_proj", "k_proj", "lm_head"]
    )
    assert_same("llama", "tensor 2", target_modules=["q_proj", "up_proj"], lora_bias=True)


def test_the_scale_of_rslora_is_the_same_where_projections_are_split() -> None:
    assert_same("llama", "tensor 2", use_rslora=True)


def test_an_adapter_of_a_fused_projection_whose_lengths_the_attention_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"vocab_size": 131, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    monkeypatch.setitem(MODELS, "gpt_bigcode", {"model_type": "gpt_bigcode", **sizes, **rates})
    assert_same("gpt_bigcode", "tensor 2", target_modules=["c_attn"])
