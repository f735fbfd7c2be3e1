"""The plain folder of a spread model: Transformers and PEFT load it, and its logits are those of the spread model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from spread_steps import VOCABULARY, spread, tiny, whole
from transformers import AutoModelForCausalLM

from harness import run_ranks
from hyper_parallel.errors import CheckpointError
from hyper_parallel.integration.hf_folder import read_folder, write_folder

IDS = torch.arange(3, 3 + 16).reshape(2, 8)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "untied": ({"axes": {"shard": 2}}, {}),
    "tied": ({"axes": {"tensor": 2}}, {"tied": True}),
    "experts": ({"axes": {"shard": 2, "expert": 2}}, {"experts": True}),
}


class Words:
    """A tokenizer, as far as folders go."""

    def save_pretrained(self, out: Path) -> None:
        (Path(out) / "words.json").write_text("[]")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits  # type: ignore[no-any-return]


def writing(rank: int, world: int, out: Path) -> dict[str, torch.Tensor]:
    found = {}
    for name, (declared, kind) in CASES.items():
        handle = spread(declared, tiny(**kind))
        with torch.no_grad():
            for parameter in handle.parameters():
                parameter.local.mul_(1.5)
        found[name] = logits(handle.model)  # leaves gathered parameters behind
        write_folder(handle, out / name, tokenizer=Words(), max_shard_size=10_000)
        write_folder(handle, out / f"{name} bfloat16", dtype=torch.bfloat16)
        again = spread(declared, tiny(**kind))
        read_folder(again, out / name)
        expected, got = whole(handle), whole(again)
        assert all(torch.equal(got[key], value) for key, value in expected.items())
    return found


def test_from_pretrained_loads_what_a_spread_model_wrote(tmp_path: Path) -> None:
    spread_logits = run_ranks(writing, 2, tmp_path)
    for name, (_, kind) in CASES.items():
        folder = tmp_path / name
        plain, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not told["missing_keys"]
        assert not told["unexpected_keys"]
        for by_rank in spread_logits:
            torch.testing.assert_close(by_rank[name], logits(plain), rtol=1e-5, atol=1e-6)
        assert type(plain) is type(tiny(**kind))
        files = sorted(path.name for path in folder.iterdir())
        assert {"config.json", "generation_config.json", "words.json", "model.safetensors.index.json"} <= set(
            files
        )
        assert sum(file.endswith(".safetensors") for file in files) > 1
        tied = plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
        assert tied == kind.get("tied", False)
        assert plain.dtype == torch.float32
        assert AutoModelForCausalLM.from_pretrained(tmp_path / f"{name} bfloat16").dtype == torch.bfloat16
        half = load_file(tmp_path / f"{name} bfloat16" / "model.safetensors")
        assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}


def adapted(seed: int) -> Any:
    model = tiny()
    torch.manual_seed(seed)
    return get_peft_model(
        model,
        LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "down_proj"]),
    )


def adapters(rank: int, world: int, out: Path) -> torch.Tensor:
    handle = spread({"axes": {"tensor": 2}}, adapted(1))
    write_folder(handle, out)
    other = spread({"axes": {"tensor": 2}}, adapted(2))
    read_folder(other, out)
    found = logits(handle.model)
    torch.testing.assert_close(logits(other.model), found)
    return found


def test_peft_loads_the_adapters_of_a_spread_model(tmp_path: Path) -> None:
    by_rank = run_ranks(adapters, 2, tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert all("lora_" in name for name in saved)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 2
    assert not (tmp_path / "model.safetensors").exists()
    plain = PeftModel.from_pretrained(tiny(), tmp_path)
    for found in by_rank:
        torch.testing.assert_close(found, logits(plain), rtol=1e-5, atol=1e-6)


def refused(rank: int, world: int, out: Path) -> list[str]:
    said = []
    handle = spread({"axes": {"shard": 2}})
    for call in (lambda: write_folder(handle, out / "file"), lambda: read_folder(handle, out / "none")):
        with pytest.raises(CheckpointError) as error:
            call()
        said.append(str(error.value))
    return said


def test_what_rank_0_cannot_write_is_told_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for writes, reads in run_ranks(refused, 2, tmp_path):
        assert f"rank 0: cannot write {tmp_path / 'file'}: a file is in the way" in writes
        assert "neither model.safetensors nor model.safetensors.index.json" in reads


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    config = tiny().config
    config.vocab_size = VOCABULARY + 1
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"has shape \[68, 16\], the model needs \[67, 16\]"):
        read_folder(spread({}), tmp_path)
