"""Frameworks are known by their names as published runs write them."""

from __future__ import annotations

import pytest

from hyper_parallel.errors import ConfigError
from hyper_parallel.planner.framework_profiles import GENERIC, PROFILES, profile, profile_of


@pytest.mark.parametrize(
    ("framework", "name"),
    [
        ("nanotron v0.5", "nanotron"),
        ("Megatron-DeepSpeed", "megatron-deepspeed"),
        ("llm-foundry/composer FSDP", "llm-foundry"),
        ("Megatron-Bridge NeMo 26.04", "megatron-bridge-recipes"),
        ("Megatron-Bridge HybridEP", "megatron-bridge-hybridep"),
        ("Megatron-Bridge", "megatron-bridge"),
        ("Megatron-LM 0.14 / TE 2.11", "megatron-lm"),
        ("NeMo 24.07", "nemo"),
        ("MindSpeed-LLM 1.0.RC3 Mcore", "mindspeed-llm"),
        ("MindSpeed/MindFormers internal", "mindspeed-llm"),
        ("MegaScale", "megascale"),
        ("TorchTitan 0.2", "torchtitan"),
        ("DeepSpeed ZeRO-3", "deepspeed"),
        ("HyperParallel", "hyper-parallel"),
        ("HAI-LLM", "hai-llm"),
        ("Meta internal (Llama 3)", "meta-llama-3"),
        ("MaxText (JAX)", "maxtext"),
        ("AxoNN 4D", "generic"),
        ("", "generic"),
    ],
)
def test_a_framework_has_the_profile_of_its_name(framework: str, name: str) -> None:
    assert profile_of(framework).name == name


def test_every_profile_has_a_source_and_is_found_by_its_name() -> None:
    for name, found in PROFILES.items():
        assert found.source
        assert profile(name) is found
        assert profile_of(name) is found


def test_an_unknown_profile_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'nanotron'"):
        profile("nanotro")
    assert profile("generic") is GENERIC
