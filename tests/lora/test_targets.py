"""Targets of a run file's adapters: linear layers are adapted, anything else is refused by its name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.config.model import AdapterConfig
from hyper_parallel.errors import ConfigError
from hyper_parallel.shard.lora_adapters import adapted_layers
from hyper_parallel.step.adapters import with_adapters

TINY = {"num_hidden_layers": 1, "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24,
        "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}  # fmt: skip


def adapted(family: str, targets: str | tuple[str, ...]) -> nn.Module:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **TINY))
    return with_adapters(model, AdapterConfig(rank=2, targets=targets))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "targets", "count"),
    [
        ("llama", ("q_proj", "lm_head"), 2),
        ("llama", ("self_attn.q_proj", "v_proj"), 2),
        ("llama", "all-linear", 7),
        ("gpt2", ("c_attn",), 1),
    ],
)
def test_linear_layers_are_adapted(family: str, targets: str | tuple[str, ...], count: int) -> None:
    assert len(list(adapted_layers(adapted(family, targets)))) == count


@pytest.mark.parametrize(
    ("family", "targets", "words"),
    [
        ("llama", ("q_proj", "v_porj"), "named 'v_porj'; did you mean 'v_proj'.*; give all-linear or some of down_"),
        ("llama", ("q_proj", "embed_tokens"), "'embed_tokens' is no linear layer but Embedding; give all-linear"),
        ("mixtral", ("q_proj", "experts"), "'experts' is no linear layer but MixtralExperts; give"),
        ("mixtral", "all-linear", "all-linear takes parameters of .*give some of k_proj, o_proj, q_proj, v_proj"),
    ],
)  # fmt: skip
def test_anything_else_is_refused(family: str, targets: str | tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.adapter\.targets: .*{words}"):
        adapted(family, targets)


def test_the_advice_for_experts_works() -> None:
    assert len(list(adapted_layers(adapted("mixtral", ("k_proj", "o_proj", "q_proj", "v_proj"))))) == 4
