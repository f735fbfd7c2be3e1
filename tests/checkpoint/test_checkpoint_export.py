"""An exported checkpoint is a folder that Transformers loads, with bitwise equal logits."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from checkpoint_worlds import save_world
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from hyper_parallel.checkpoint import Piece, Writer, export
from hyper_parallel.errors import CheckpointError
from hyper_parallel.layout import Layout, Mesh

SMALL = {
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS = {
    "llama tied": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "llama untied": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=False)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=67, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
    ),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SMALL)),
}
FUSED = {"c_attn": (16, 16, 16), "qkv_proj": (16, 8, 8), "gate_up_proj": (24, 24)}
MESHES = [Mesh(), Mesh(("shard", 2), ("tensor", 2)), Mesh(("replicate", 2), ("shard", 3))]


def layout_of(name: str, shape: tuple[int, ...], mesh: Mesh, choose: random.Random) -> Layout:
    """Some layout for a parameter: fused projections part by part over tensor, anything else at random."""
    layout = Layout.replicated(mesh, shape)
    for axis in reversed(mesh.names):
        if axis == "replicate":
            continue
        dim = choose.randrange(len(shape))
        parts = next(
            (parts for key, parts in FUSED.items() if key in name and sum(parts) == shape[dim]), None
        )
        layout = layout.split(dim, axis, None if layout.dims[dim] else parts)
    return layout


def saved(folder: Path, model: torch.nn.Module, mesh: Mesh) -> Path:
    """A checkpoint of the model and of an optimizer's state, which an export leaves out."""
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    choose = random.Random(len(tensors))
    layouts = {name: layout_of(name, tuple(t.shape), mesh, choose) for name, t in tensors.items()}
    tensors["optimizer.step"] = torch.tensor(3)
    layouts["optimizer.step"] = Layout.replicated(mesh, ())
    return save_world(folder, tensors, layouts, mesh, 3, {"model_config": model.config.to_dict()})[0]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(60).reshape(2, 30)).logits


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_it_with_equal_logits(tmp_path, name, mesh):
    torch.manual_seed(0)
    model = MODELS[name]()
    out = export(saved(tmp_path / "run", model, mesh), tmp_path / "out")
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert type(loaded) is type(model)
    tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert tied == model.config.tie_word_embeddings
    assert torch.equal(logits(loaded), logits(model))
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_large_models_are_split_into_files(tmp_path):
    model = MODELS["llama untied"]()
    out = export(saved(tmp_path / "run", model, Mesh()), tmp_path / "out", shard_bytes=5000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("model-*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in model.parameters())
    for file in files:
        with safe_open(file, "pt") as opened:
            assert {index["weight_map"][key] for key in opened.keys()} == {file.name}  # noqa: SIM118 - not a dict
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out)), logits(model))


def test_another_dtype(tmp_path):
    model = MODELS["gpt2"]()
    out = export(saved(tmp_path / "run", model, MESHES[1]), tmp_path / "out", dtype=torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(logits(loaded), logits(model.to(torch.bfloat16)))


def test_a_bfloat16_checkpoint_stays_bfloat16(tmp_path):
    # Not .to(): that rounds the rotary frequencies too, which Transformers keeps in float32.
    model = AutoModelForCausalLM.from_config(MODELS["llama tied"]().config, dtype=torch.bfloat16)
    model.config.dtype = torch.float32  # what is stored decides, not what the config was made with
    out = export(saved(tmp_path / "run", model, MESHES[1]), tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.bfloat16 and torch.equal(logits(loaded), logits(model))


def write(folder: Path, state: dict, assets: dict[str, bytes] | None = None, name: str = "model.w") -> Path:
    with Writer(folder, 1, 0) as writer:
        piece = Piece(torch.ones(2, 3), Layout.replicated(Mesh(), (2, 3)))
        writer.save(1, {name: piece}, state, assets=assets)
        path = writer.wait()
    assert path is not None
    return path


def test_assets_go_along(tmp_path):
    assets = {"tokenizer.json": b'{"a": 1}', "generation_config.json": b"{}"}
    out = export(
        write(tmp_path / "run", {"model_config": {"model_type": "x"}}, assets), tmp_path / "a" / "out"
    )
    assert {name: (out / name).read_bytes() for name in assets} == assets
    assert json.loads((out / "config.json").read_text()) == {"model_type": "x", "dtype": "float32"}


def test_what_cannot_be_exported_leaves_nothing(tmp_path):
    config = {"model_config": {}}
    good = write(tmp_path / "good", config)
    for path, words in (
        (write(tmp_path / "a", {}), "holds no model config"),
        (write(tmp_path / "b", config, name="w"), "holds no tensor whose name begins with 'model.'"),
        (write(tmp_path / "c", config, {"config.json": b""}), "would overwrite"),
        (tmp_path / "nothing", "no commit marker"),
    ):
        with pytest.raises(CheckpointError, match=words):
            export(path, tmp_path / "out")
    data = good / "rank-00000.safetensors"
    raw = bytearray(data.read_bytes())
    raw[-1] ^= 1
    data.write_bytes(raw)
    with pytest.raises(CheckpointError, match="sha256"):
        export(good, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    for out, words in (
        ("full", "is not an empty folder"),
        ("full/x", "is not an empty"),
        ("full/x/y", "in the way"),
    ):
        with pytest.raises(CheckpointError, match=words):
            export(write(tmp_path / "good", config), tmp_path / out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "full", "good"]


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "out").mkdir()
    assert (export(write(tmp_path / "run", {"model_config": {}}), tmp_path / "out") / "config.json").exists()


def test_adapters_of_an_unknown_scale_are_refused(tmp_path):
    """Where nothing says how they are merged; runs say it (tests/lora/test_export_adapters.py)."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        next(iter(MODELS.values()))(), peft.LoraConfig(target_modules="all-linear", r=2)
    )
    with pytest.raises(CheckpointError, match="holds adapters within their base model"):
        export(saved(tmp_path / "run", model, MESHES[0]), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
