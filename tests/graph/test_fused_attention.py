"""Attention with values of fewer features than its keys: padded, it gives the same numbers and is one kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from hyper_parallel.config import RunConfig
from hyper_parallel.estimate.predict import cluster_of, predict_run
from hyper_parallel.graph import capture
from hyper_parallel.graph.capture_overrides import padded_values
from hyper_parallel.graph.ir import GivenTensor
from hyper_parallel.graph.step_context import current_step

MLA = {
    "model_type": "deepseek_v3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
}


def _inputs(value: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 6, 12), torch.randn(2, 3, 6, 12), torch.randn(2, 3, 6, value)
    return q.double(), k.double(), v.double()


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"scale": 0.2}, {"attn_mask": torch.randn(6, 6).double()}]
)
def test_the_numbers_and_gradients_are_those_without_padding(options: dict[str, object]) -> None:
    found = []
    for context in (padded_values(), torch.autograd.graph.save_on_cpu()):
        q, k, v = (one.requires_grad_() for one in _inputs())
        with context:
            result = functional.scaled_dot_product_attention(q, k, v, **options)  # type: ignore[arg-type]
        result.square().sum().backward()
        found.append([result, q.grad, k.grad, v.grad])
    for mine, expected in zip(*found, strict=True):
        assert mine is not None
        assert torch.allclose(mine, expected, rtol=1e-12, atol=1e-14)


def test_positional_arguments_and_heads_of_one_size_are_left_alone() -> None:
    q, k, v = _inputs(12)
    with padded_values():
        found = functional.scaled_dot_product_attention(q, k, v, None, 0.0, True)
    assert torch.equal(found, functional.scaled_dot_product_attention(q, k, v, None, 0.0, True))
    q, k, v = _inputs()
    with padded_values():
        found = functional.scaled_dot_product_attention(q, k, v, None, 0.0, True)
    assert torch.allclose(
        found, functional.scaled_dot_product_attention(q, k, v, None, 0.0, True), rtol=1e-12, atol=1e-14
    )


def _operators(pads: bool) -> set[str]:
    with torch._subclasses.FakeTensorMode():
        q, k, v = (torch.empty(2, 3, 64, size) for size in (12, 12, 8))
        given = {name: GivenTensor("input", one) for name, one in (("q", q), ("k", k), ("v", v))}
        with replace(current_step(), pads_values=pads).installed():
            step = capture(
                lambda: {"out": functional.scaled_dot_product_attention(q, k, v, is_causal=True)}, given
            )
    return {str(node.target) for node in step.nodes}


def test_a_capture_has_one_kernel_where_it_is_asked_for() -> None:
    assert any("flash_attention" in name for name in _operators(True))
    assert any("bmm" in name for name in _operators(False))


def test_a_prediction_for_an_accelerator_has_attention_as_one_kernel() -> None:
    data = {
        "version": 1,
        "out": "runs/x",
        "model": {"config": MLA},
        "data": {"train": "python-stdlib", "sequence": 512},
        "train": {"batch": 1},
    }
    config = RunConfig.model_validate(data)
    assert predict_run(config, cluster_of("h100", config)).parts["attention"] > 0
