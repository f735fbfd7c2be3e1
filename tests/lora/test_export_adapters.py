"""Export of a run with adapters: a plain folder whose model computes what the trained model with adapters does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.checkpoint import export
from train.tiny_run import run, run_config

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 64},
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "vocab_size": 300, "bos_token_id": 0,
             "eos_token_id": 0},
}  # fmt: skip


@pytest.mark.parametrize(("family", "rslora"), [("llama", True), ("gpt2", False)])
def test_the_exported_model_computes_what_was_trained(tmp_path: Path, family: str, rslora: bool) -> None:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **MODELS[family]))
    ids = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        before = plain.eval()(input_ids=ids).logits
    # Square weights too: a Conv1D's product has to be transposed.
    settings = LoraConfig(
        r=4, lora_alpha=32, use_rslora=rslora, target_modules="all-linear", fan_in_fan_out=family == "gpt2"
    )
    model = get_peft_model(plain, settings)
    train = {"steps": 4, "sample": False, "engine": "eager", "optimizer": {"name": "lion", "lr": 1e-2}}
    summary = run(run_config(tmp_path, train=train), model)
    assert summary.checkpoint is not None
    with torch.no_grad():
        trained = model.eval()(input_ids=ids).logits
    out = export(summary.checkpoint, tmp_path / "exported")
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(out).eval()(input_ids=ids).logits
    assert (trained - before).abs().max() > 0.1
    torch.testing.assert_close(found, trained, atol=1e-4, rtol=0)
