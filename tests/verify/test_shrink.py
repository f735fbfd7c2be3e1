"""A family's default config with its sizes cut: small enough to train in a test, and divided as it was."""

from __future__ import annotations

import math

import pytest
from transformers import CONFIG_MAPPING

from harness.equivalence import build_model
from harness.small_models import HEADS, HIDDEN, VOCABULARY, noisy_model, shrunken, small_fields


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        # 32 heads of 128 and 4096 features, 11008 between: 43/16 of them.
        ("llama", {"hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 8}),
        # A quarter as many key-value heads as query heads.
        ("mistral", {"num_key_value_heads": 2}),
        ("falcon", {"num_kv_heads": 8, "num_attention_heads": 8}),
        ("deepseek_v3", {"qk_rope_head_dim": 8, "n_routed_experts": 8, "first_k_dense_replace": 1}),
        # One attention with a window and one without.
        ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}),
        ("gpt2", {"n_embd": 64, "n_head": 8, "n_layer": 2, "attn_pdrop": 0.0, "resid_pdrop": 0.0}),
        ("bert", {"is_decoder": True}),
    ],
)
def test_sizes_are_cut_and_ratios_kept(family: str, fields: dict[str, object]) -> None:
    made = shrunken(CONFIG_MAPPING[family]())
    default = CONFIG_MAPPING[family]().to_dict()
    for key, value in fields.items():
        assert made.get(key, default[key]) == value, key


@pytest.mark.parametrize("family", ["llama", "jamba", "gemma3n_text", "opt", "xglm", "zamba2"])
def test_a_small_config_makes_a_small_model(family: str) -> None:
    model = build_model(shrunken(CONFIG_MAPPING[family]()))
    embedding = model.get_input_embeddings()
    assert embedding.weight.shape[0] == VOCABULARY
    assert sum(math.prod(p.shape) for p in model.parameters()) < 10**6
    config = model.config.get_text_config()
    assert config.hidden_size == HIDDEN
    assert config.num_attention_heads == HEADS


def test_a_model_that_is_built_with_values_has_the_same_ones_each_time() -> None:
    fields = shrunken(CONFIG_MAPPING["apertus"]())
    first, second = (dict(build_model(fields, "cpu").named_parameters()) for _ in range(2))
    assert all(p.equal(second[name]) for name, p in first.items())
    assert not any(p.is_meta for p in first.values())


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.5}),
        ("jetmoe", {"output_router_logits": True, "aux_loss_coef": 0.5}),
        ("bamba", {"z_loss_coefficient": 0.5}),
    ],
)
def test_auxiliary_losses_are_switched_on(family: str, fields: dict[str, object]) -> None:
    small, more = small_fields(family), small_fields(family, auxiliary=True, vocab_size=99)
    assert {key: value for key, value in more.items() if small.get(key) != value} == {
        **fields,
        "vocab_size": 99,
    }


def test_an_auxiliary_loss_in_a_section_leaves_the_rest_of_the_section() -> None:
    section = small_fields("dbrx")["ffn_config"]
    assert small_fields("dbrx", auxiliary=True)["ffn_config"] == {**section, "moe_loss_weight": 0.5}


def test_no_value_of_a_noisy_model_is_neutral() -> None:
    model = noisy_model(small_fields("glm4_moe"))
    bias = "e_score_correction_bias"
    tensors = {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if bias in n}}
    assert any(bias in name for name in tensors)
    assert all(tensor.std() > 0.02 for tensor in tensors.values())
    assert not any(((tensor == 0) | (tensor == 1)).any() for tensor in tensors.values())
    again = dict(noisy_model(small_fields("glm4_moe")).named_parameters())
    assert all(parameter.equal(again[name]) for name, parameter in model.named_parameters())
