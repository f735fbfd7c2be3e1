"""The FLOP count against a count made by PyTorch while it computes, and against hand arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from harness.small_models import small_fields
from hyper_parallel.errors import ConfigError
from hyper_parallel.workload import Flops, flops_of_model, mfu

CONFIGS = {
    "llama": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8,
                  "num_key_value_heads": 2, "vocab_size": 320, "tie_word_embeddings": False},
    "llama-tied": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                       "num_key_value_heads": 4, "vocab_size": 320, "tie_word_embeddings": True},
    "qwen3": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                  "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 320},
    "phi3": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "vocab_size": 320, "pad_token_id": 0},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 320, "n_positions": 64,
             "bos_token_id": 0, "eos_token_id": 0},
}  # fmt: skip


def _model(name: str) -> torch.nn.Module:
    config = AutoConfig.for_model(name.split("-")[0], **CONFIGS[name])
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("name", CONFIGS)
def test_the_count_agrees_with_what_pytorch_counts(name: str) -> None:
    model = _model(name)
    sequence = 48
    ids = torch.zeros(1, sequence, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    flops = flops_of_model(model)
    # PyTorch counts the whole attention matrix, the convention the causal half; rotary tables cost a little.
    attention = 12 * flops.heads_times_size * len(flops.windows) * sequence * sequence
    causal = flops.per_token(sequence) * sequence
    assert causal == pytest.approx(6 * flops.matmul_parameters * sequence + attention / 2)
    assert causal + attention / 2 == pytest.approx(counter.get_total_flops(), rel=5e-3)


def test_a_sliding_window_counts_the_keys_that_it_keeps() -> None:
    flops = Flops(0, 1, (4, None))
    exact = sum(min(i + 0.5, 4) for i in range(16)) / 16
    assert flops.per_token(16) / 12 == pytest.approx(exact + 8, rel=0.05)
    assert Flops(0, 1, (16,)).per_token(16) == Flops(0, 1, (None,)).per_token(16)


def test_windows_are_read_by_layer() -> None:
    config = {
        **CONFIGS["llama"],
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    config["num_hidden_layers"] = 4
    model = torch.nn.Sequential()
    assert flops_of_model(model, config).windows == (8, None, 8, None)
    assert flops_of_model(model, {**config, "use_sliding_window": False}).windows == (None,) * 4


def test_a_plain_module_counts_matrices_once_and_lookups_not() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 6), torch.nn.Linear(6, 10))
    assert flops_of_model(model).matmul_parameters == 4 * 6 + 6 * 10


def test_a_config_without_the_needed_field_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_hidden_layers or n_layer"):
        flops_of_model(torch.nn.Sequential(), {"model_type": "mystery"})


def test_mfu() -> None:
    assert mfu(3e12, seconds=2, devices=3, peak=1e12) == pytest.approx(0.5)


def test_of_experts_those_count_that_a_token_goes_through() -> None:
    sizes = {
        "vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(**sizes))
    attention, router, expert = 4 * 8 * 8, 4 * 8, 3 * 8 * 16
    assert flops_of_model(model).matmul_parameters == 2 * (attention + router + 2 * expert) + 8 * 32


@pytest.mark.parametrize(("family", "attending"), [("rwkv", 0), ("xlstm", 0), ("longcat_flash", 4)])
def test_layers_that_a_config_names_otherwise(family: str, attending: int) -> None:
    fields = small_fields(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    assert len(flops_of_model(model).windows) == attending
