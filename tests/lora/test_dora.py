"""DoRA: magnitudes begin as peft's, gradients are one device's on the axes that do not split a matrix's product."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel import shard
from hyper_parallel.compat.local_tensor import one_device
from hyper_parallel.strategy import Strategy
from lora.test_export_adapters import MODELS
from lora.test_lora_gradients import assert_same

TARGETS = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}


def settings(family: str) -> LoraConfig:
    return LoraConfig(r=4, target_modules=TARGETS[family], use_dora=True, fan_in_fan_out=family == "gpt2")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_magnitudes_begin_as_pefts(tmp_path: Path, family: str) -> None:
    torch.manual_seed(0)
    base: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **MODELS[family]))
    base.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = get_peft_model(AutoModelForCausalLM.from_config(base.config), settings(family))
    with one_device():
        shard.parallelize(model, Strategy())
        shard.load_weights(model, tmp_path, seed=3)
    expected = get_peft_model(base, settings(family)).state_dict()
    found = {name: value for name, value in model.state_dict().items() if "magnitude" in name}
    assert len(found) >= 2
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name])


@pytest.mark.parametrize("strategy", ["shard 2", "context 2", "replicate 2 shard 2"])
def test_gradients_are_one_devices(strategy: str) -> None:
    assert_same("llama", strategy, use_dora=True)


def test_gradients_where_weights_are_kept_by_columns() -> None:
    assert_same("gpt2", "shard 2", use_dora=True)
