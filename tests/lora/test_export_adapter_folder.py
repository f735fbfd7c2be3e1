"""Export of a run's adapters alone: PEFT loads the folder, and computes what the trained model does."""

from __future__ import annotations

import argparse
import bisect
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.checkpoint import export_adapter
from hyper_parallel.checkpoint.adapters import _base
from hyper_parallel.cli.main import main
from hyper_parallel.errors import CheckpointError
from lora.test_export_adapters import MODELS
from train.tiny_run import run, run_config

TRAIN: dict[str, Any] = {
    "steps": 3,
    "sample": False,
    "engine": "eager",
    "optimizer": {"name": "lion", "lr": 1e-2},
}
IDS = torch.arange(20).unsqueeze(0)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found = model.eval()(input_ids=IDS).logits
    assert isinstance(found, torch.Tensor)
    return found


def loaded(base: Path, folder: Path) -> Any:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)


@pytest.mark.parametrize(("rslora", "dora"), [(False, False), (True, False), (False, True)])
def test_peft_loads_what_a_run_file_trained(tmp_path: Path, rslora: bool, dora: bool) -> None:
    torch.manual_seed(0)
    base = tmp_path / "base"
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **MODELS["llama"])).save_pretrained(base)
    adapter = {
        "rank": 4,
        "alpha": 96,
        "rslora": rslora,
        "dora": dora,
        "targets": ["q_proj", "down_proj"],
    }
    data = {
        "train": [argparse.__file__, bisect.__file__],
        "tokenizer": {"vocab_size": 300, "replace": True},
        "sequence": 32,
    }
    model = {"config": None, "path": str(base), "adapter": adapter}
    config = run_config(
        tmp_path, model=model, data=data, train={**TRAIN, "engine": "graph" if dora else "eager"}
    )
    summary = run(config)
    assert summary.checkpoint is not None
    whole, alone = tmp_path / "whole", tmp_path / "alone"
    for out, option in ((whole, []), (alone, ["--adapter"])):
        with contextlib.suppress(SystemExit):  # what it wrote is looked at
            main(["export", str(tmp_path / "run"), str(out), *option])
    trained = logits(AutoModelForCausalLM.from_pretrained(whole))
    assert (trained - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 0.02
    torch.testing.assert_close(logits(loaded(base, alone)), trained, atol=1e-4, rtol=0)
    assert sorted(path.name for path in alone.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    written = json.loads((alone / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(base)
    assert (written["r"], written["lora_alpha"], written["use_rslora"]) == (4, 96, rslora)
    assert written["use_dora"] == dora
    assert written["target_modules"] == ["down_proj", "q_proj"]


def test_ranks_and_scales_of_each_layer_and_layers_that_end_alike(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = tmp_path / "base"
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **MODELS["gpt2"]))
    plain.save_pretrained(base)
    settings = LoraConfig(
        r=4,
        lora_alpha=32,
        target_modules=["attn.c_attn", "mlp.c_proj"],  # and not attn.c_proj, which ends alike
        rank_pattern={"c_attn": 2},
        alpha_pattern={"c_attn": 8},
        fan_in_fan_out=True,
    )
    model = get_peft_model(plain, settings)
    summary = run(run_config(tmp_path, train=TRAIN), model)
    assert summary.checkpoint is not None
    out = export_adapter(summary.checkpoint, tmp_path / "alone")
    written = json.loads((out / "adapter_config.json").read_text())
    assert written["target_modules"] == ["transformer.h.0.attn.c_attn", "transformer.h.0.mlp.c_proj"]
    assert written["base_model_name_or_path"] is None
    torch.testing.assert_close(logits(loaded(base, out)), logits(model), atol=1e-4, rtol=0)


def test_a_run_without_adapters_is_refused(tmp_path: Path) -> None:
    summary = run(run_config(tmp_path, train={**TRAIN, "steps": 2}))
    assert summary.checkpoint is not None
    with pytest.raises(CheckpointError, match="holds no LoRA adapters; leave --adapter out"):
        export_adapter(summary.checkpoint, tmp_path / "alone")
    assert not (tmp_path / "alone").exists()


def test_the_base_model_is_named_as_peft_looks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert _base(f"hub:Qwen/Qwen3-0.6B@{commit}") == ("Qwen/Qwen3-0.6B", commit)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert _base("models") == (str(tmp_path / "models"), None)
    assert _base("/elsewhere/model") == ("/elsewhere/model", None)
    assert _base(None) == (None, None)
