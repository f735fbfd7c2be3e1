"""An exported folder has the names that `save_pretrained` writes, and Transformers reads the same weights from it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hyper_parallel.checkpoint import Piece, Writer, export
from hyper_parallel.checkpoint.adapters import STATE, merge_state
from hyper_parallel.errors import CheckpointError
from hyper_parallel.layout import Layout, Mesh
from shard.converted_families import FAMILIES, logits, noisy, stored

peft = pytest.importorskip("peft")
TINY = {"num_hidden_layers": 1, "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip


def checkpoint(folder: Path, model: Any, **state: Any) -> Path:
    """What a run saves of a model: every parameter once, and the persistent buffers."""
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    tensors |= {name: tensor for name, tensor in model.named_buffers() if name in model.state_dict()}
    pieces = {
        f"model.{name}": Piece(tensor.clone(), Layout.replicated(Mesh(), tuple(tensor.shape)))
        for name, tensor in tensors.items()
    }
    config = json.loads(model.config.to_json_string(use_diff=False))
    with Writer(folder, 1, 0) as writer:
        writer.save(1, pieces, {"model_config": config, **state})
        path = writer.wait()
    assert path is not None
    return path


@pytest.mark.parametrize(
    "family", [*FAMILIES, "nemotron_h"]
)  # whose config has a limit that JSON cannot write
def test_the_names_are_those_of_save_pretrained(family: str, tmp_path: Path) -> None:
    model = noisy(family)
    model.save_pretrained(tmp_path / "model")
    out = export(checkpoint(tmp_path / "run", model), tmp_path / "out")
    expected, written = stored(tmp_path / "model"), stored(out)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__]
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out)), logits(model))


def test_files_are_split_where_one_weight_becomes_several(tmp_path: Path) -> None:
    model = noisy("mixtral", num_local_experts=2)
    out = export(checkpoint(tmp_path / "run", model), tmp_path / "out", shard_bytes=20_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert "model.layers.0.block_sparse_moe.experts.1.w2.weight" in index
    assert all(name in load_file(out / file) for name, file in index.items())
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out)), logits(model))


class Wrapped(torch.nn.Module):
    """A module of the user's around Transformers'."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = noisy("llama", **TINY)
        self.config = self.inner.config


def test_another_module_keeps_its_names_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        out = export(checkpoint(tmp_path / "run", Wrapped()), tmp_path / "out")
    assert "inner.lm_head.weight" in stored(out)
    assert "they keep the names of the module, such as 'inner." in caplog.text


def test_a_head_of_its_own_is_written_although_the_config_ties_it(tmp_path: Path) -> None:
    model = noisy("llama", **TINY, tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    out = export(checkpoint(tmp_path / "run", model), tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out)), logits(model))


def adapted(tied: bool, **settings: Any) -> Any:
    model = noisy("llama", **TINY, tie_word_embeddings=tied)
    torch.manual_seed(1)
    options = {"r": 2, "init_lora_weights": False, "target_modules": ["lm_head", "q_proj"], **settings}
    return peft.get_peft_model(model, peft.LoraConfig(**options)).eval()


@pytest.mark.parametrize(
    ("tied", "settings"),
    [
        (True, {}),
        (True, {"target_modules": ["lm_head"], "use_dora": True}),
        (False, {"use_rslora": True, "alpha_pattern": {"lm_head": 5}, "rank_pattern": {"q_proj": 3}}),
    ],
)
def test_adapters_of_the_head_are_merged(tied: bool, settings: dict[str, Any], tmp_path: Path) -> None:
    """A head that is tied to the embedding is untied, since the embedding has no adapter."""
    model = adapted(tied, **settings)
    path = checkpoint(tmp_path / "run", model, **{STATE: merge_state(model)})
    out = export(path, tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(logits(found), logits(model), atol=1e-5, rtol=1e-5)
    base = model.base_model.model.model.embed_tokens.weight
    assert torch.equal(found.get_input_embeddings().weight, base)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["embed_tokens"]},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]},
    ],
    ids=["embedding", "bias", "saved module"],
)
def test_what_is_not_merged_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    model = adapted(False, **settings)
    path = checkpoint(tmp_path / "run", model, **{STATE: merge_state(model)})
    with pytest.raises(CheckpointError, match="holds adapters"):
        export(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
