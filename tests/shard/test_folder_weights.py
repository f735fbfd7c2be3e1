"""A folder's weights are those that Transformers reads from it, and nothing of it is left out without a word."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from converted_families import FAMILIES, blank, logits, noisy, stored
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

import hyper_parallel as hp
from harness import run_ranks
from hyper_parallel.config import ModelConfig
from hyper_parallel.errors import CheckpointError
from hyper_parallel.step.build import causal_model, transformers_config

TINY = {"num_hidden_layers": 1, "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip


def loaded(folder: Path, **fields: Any) -> Any:
    model = hp.parallelize(blank(folder, **fields), hp.Strategy(check=False))
    hp.load_weights(model, folder)
    return model


def rewritten(folder: Path, **changes: torch.Tensor | None) -> None:
    """Change tensors of a folder; None takes one out. Two underscores stand for a dot."""
    tensors = stored(folder)
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_wrote_is_read_as_transformers_reads_it(family: str, tmp_path: Path) -> None:
    model = noisy(family)
    model.save_pretrained(tmp_path)
    assert stored(tmp_path).keys() != model.state_dict().keys()
    found, expected = loaded(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert found.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.state_dict().items())
    assert torch.equal(logits(found), logits(model))


SPREAD = ("gpt_neox", "phimoe")


def _pieces(rank: int, world: int, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for family in SPREAD:
        model = blank(folder / family)
        hp.parallelize(model, hp.Strategy(axes={"shard": 2, "tensor": 2}, check=False))
        hp.load_weights(model, folder / family)
        handle = hp.sharded(model)
        found[family] = {p.name: handle.gather(p.local, p.layout) for p in handle.parameters()}
    return found


def test_ranks_read_their_pieces_of_converted_weights(tmp_path: Path) -> None:
    models = {family: noisy(family) for family in SPREAD}
    for family, model in models.items():
        model.save_pretrained(tmp_path / family)
    for found in run_ranks(_pieces, 4, tmp_path):
        for family, model in models.items():
            for name, parameter in model.named_parameters():
                assert torch.equal(found[family][name], parameter), name


def test_the_names_of_older_folders_are_read(tmp_path: Path) -> None:
    """A base model's folder has no prefix, and Mixtral's published one has a tensor for each expert."""
    model = noisy("mixtral", num_local_experts=2)
    model.save_pretrained(tmp_path)
    names = stored(tmp_path)
    assert "model.layers.0.block_sparse_moe.experts.1.w3.weight" in names
    save_file(
        {name.removeprefix("model."): value for name, value in names.items()}, tmp_path / "model.safetensors"
    )
    assert torch.equal(logits(loaded(tmp_path)), logits(model))


def test_a_learned_buffer_that_is_missing_is_refused(tmp_path: Path) -> None:
    noisy("ernie4_5_moe").save_pretrained(tmp_path)
    [name, *_] = [name for name in stored(tmp_path) if "e_score_correction_bias" in name]
    rewritten(tmp_path, **{name: None})
    with pytest.raises(CheckpointError, match=f"no tensor '{name}', which .* is made of.*; the folder holds"):
        loaded(tmp_path)


def test_tensors_that_are_not_taken_are_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    noisy("llama", **TINY).save_pretrained(tmp_path)
    # Transformers' own list of what older folders have, and nobody misses.
    rewritten(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    loaded(tmp_path)
    assert not caplog.records
    rewritten(
        tmp_path, model__layers__0__self_attn__q_norm__weight=torch.ones(8), score__weight=torch.ones(1, 16)
    )
    with caplog.at_level(logging.WARNING):
        loaded(tmp_path)
    [record] = caplog.records
    assert f"{tmp_path}: not taken, since the model has no such weights: " in record.message
    assert "model.layers.0.self_attn.q_norm.weight, " in record.message
    assert "score.weight" in record.message


def test_a_head_of_its_own_under_a_config_that_ties_it(tmp_path: Path) -> None:
    model = noisy("llama", **TINY, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    head = stored(tmp_path)["model.embed_tokens.weight"]
    rewritten(tmp_path, lm_head__weight=head.clone())
    assert torch.equal(logits(loaded(tmp_path)), logits(model))  # the same values: tied
    rewritten(tmp_path, lm_head__weight=head + 1)
    with pytest.raises(CheckpointError, match=r"different values there.*tie_word_embeddings=False"):
        loaded(tmp_path)
    expected = logits(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert torch.equal(logits(loaded(tmp_path, tie_word_embeddings=False)), expected)
    # A run does so by itself.
    config = transformers_config(ModelConfig(path=str(tmp_path)))
    built = hp.parallelize(
        causal_model(config, torch.float32, folder=str(tmp_path)), hp.Strategy(check=False)
    )
    hp.load_weights(built, tmp_path)
    assert torch.equal(logits(built), expected)
    assert built.config.tie_word_embeddings is False


def test_the_tied_weight_may_be_under_its_other_name(tmp_path: Path) -> None:
    model = noisy("llama", **TINY, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    embedding = stored(tmp_path)["model.embed_tokens.weight"]
    rewritten(tmp_path, lm_head__weight=embedding, model__embed_tokens__weight=None)
    assert torch.equal(logits(loaded(tmp_path)), logits(model))


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4, bias=False)
        self.register_buffer("mean", torch.zeros(4))

    def reset_parameters(self) -> None:
        pass


def test_a_module_that_is_not_transformers_has_its_own_names(tmp_path: Path) -> None:
    values = {"map.weight": torch.randn(4, 4), "mean": torch.ones(4)}
    save_file(values, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Module()
    hp.parallelize(model, hp.Strategy(check=False))
    hp.load_weights(model, tmp_path)
    assert torch.equal(model.map.weight, values["map.weight"])
    assert torch.equal(model.mean, values["mean"])
    with torch.device("meta"):
        other = Module()
    hp.parallelize(other, hp.Strategy(check=False))
    save_file({"map.weight": values["map.weight"]}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no tensor 'mean'"):
        hp.load_weights(other, tmp_path)
