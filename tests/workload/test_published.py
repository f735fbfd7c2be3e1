"""Published shapes: their parameters are those that are stated, and names are found as people type them."""

from __future__ import annotations

import pytest

from hyper_parallel.errors import ConfigError
from hyper_parallel.workload.published import known, names, shape

# Billions of parameters, as model cards, safetensors' headers and papers state them.
STATED = {
    "llama-7b": 6.738,
    "llama-65b": 65.286,
    "llama-2-13b": 13.016,
    "llama-2-70b": 68.977,
    "llama-3-8b": 8.03,
    "llama-3-70b": 70.554,
    "llama-3-405b": 405.853,
    "llama-3.2-1b": 1.236,
    "llama-3.2-3b": 3.213,
    "mistral-7b": 7.242,
    "mistral-nemo-12b": 12.248,
    "mixtral-8x7b": 46.703,
    "mixtral-8x22b": 140.62,
    "qwen-1.5-32b": 32.512,
    "qwen-1.5-110b": 111.21,
    "qwen-2-0.5b": 0.494,
    "qwen-2-57b-a14b": 57.4,
    "qwen-2.5-72b": 72.706,
    "qwen-3-0.6b": 0.596,
    "qwen-3-32b": 32.762,
    "qwen-3-30b-a3b": 30.532,
    "qwen-3-235b-a22b": 235.09,
    "gemma-7b": 8.538,
    "gemma-2-9b": 9.242,
    "gemma-2-27b": 27.227,
    "gemma-3-1b": 1.0,
    "phi-3-mini": 3.821,
    "phi-3.5-moe": 41.873,
    "phi-4": 14.66,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
    "deepseek-67b": 67.425,
    "deepseek-moe-16b": 16.376,
    "deepseek-v2-lite": 15.706,
    "deepseek-v2": 235.74,
    "deepseek-v3": 671.03,
    "kimi-k2": 1026.4,
    "moonlight-16b": 15.96,
    "gpt-2-xl": 1.558,
    "gpt-3-175b": 174.6,
    "megatron-18b": 18.4,
    "megatron-145b": 145.6,
    "megatron-310b": 310.1,
    "megatron-530b": 529.6,
    "megatron-1t": 1008.0,
    "nemotron-4-340b": 341.0,
    "mpt-7b": 6.6589,
    "mpt-70b": 64.8624,
    "nanotron-1b": 1.34,
    "nanotron-3b": 3.57,
    "nanotron-8b": 8.86,
    "chatglm-3-6b": 6.244,
    "glm-4-9b": 9.4,
    "baichuan-2-13b": 13.897,
    "bloom-176b": 176.25,
    "internlm-2-20b": 19.861,
    "yi-34b": 34.389,
    "olmo-2-32b": 32.234,
    "olmoe-1b-7b": 6.919,
    "smollm-3-3b": 3.075,
    "dbrx-132b": 131.6,
}
# Papers that give rounded totals.
ROUNDED = {"pangu-ultra-135b": 135, "pangu-ultra-moe-718b": 718, "telechat-2-115b": 115, "minicpm-8x2b": 13.6}
ACTIVE = {
    "mixtral-8x7b": 12.9,
    "deepseek-v3": 37.6,
    "kimi-k2": 32.9,
    "qwen-3-235b-a22b": 22.2,
    "gpt-oss-120b": 5.7,
}


@pytest.mark.parametrize("name", STATED)
def test_parameters_are_those_stated(name: str) -> None:
    assert shape(name).parameters / 1e9 == pytest.approx(STATED[name], rel=4e-3)


@pytest.mark.parametrize("name", ROUNDED)
def test_parameters_are_those_of_a_rounded_total(name: str) -> None:
    assert shape(name).parameters / 1e9 == pytest.approx(ROUNDED[name], rel=2.5e-2)


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_those_stated(name: str) -> None:
    assert shape(name).active_parameters / 1e9 == pytest.approx(ACTIVE[name], rel=1e-2)


def test_every_shape_has_a_source() -> None:
    for name in names():
        found = shape(name)
        assert found.name == name and found.source


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("Llama-3.1-405B-Instruct", "llama-3.1-405b"),
        ("llama3_405b", "llama-3-405b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("Qwen3_30B_a3B", "qwen-3-30b-a3b"),
        ("Qwen/Qwen2.5-72B", "qwen-2.5-72b"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini"),
        ("GPT3-175B", "gpt-3-175b"),
        ("DeepSeek-V3-671B", "deepseek-v3"),
        ("Moonlight-16B-A3B", "moonlight-16b"),
    ],
)
def test_names_are_found_as_people_type_them(typed: str, name: str) -> None:
    assert shape(typed).name == name


def test_an_unknown_name_is_told_with_the_nearest() -> None:
    assert known("llama-3-406b") is None
    with pytest.raises(ConfigError, match="did you mean 'llama-3-405b'"):
        shape("llama-3-406b")
