"""Weights go straight into shards: the right values, and no rank ever holds the whole model."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from families import FAMILIES, build
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from harness import run_ranks
from harness.families import WITH_IMAGES
from hyper_parallel import shard
from hyper_parallel.errors import CheckpointError
from hyper_parallel.strategy import Strategy


def saved(family: str, folder: Path) -> torch.nn.Module:
    fields = dict(FAMILIES[family])
    torch.manual_seed(0)
    auto = AutoModelForImageTextToText if family in WITH_IMAGES else AutoModelForCausalLM
    attention = fields.pop("attn_implementation", None)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = auto.from_config(config, attn_implementation=attention)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_()  # a buffer that is a weight: zeros at first, learned in training
    model.save_pretrained(folder)
    return model


LOADED = ("llama-tied", "phi3", "gpt2", "mixtral", "deepseek-v3", "qwen2.5-vl")


def _loaded(rank: int, world: int, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for family in LOADED:
        model = build(family)
        shard.parallelize(model, Strategy(axes={"shard": 2, "tensor": 2}, check=False))
        shard.load_weights(model, folder / family)
        handle = shard.sharded(model)
        found[family] = {p.name: handle.gather(p.local, p.layout) for p in handle.parameters()}
    return found


def test_loaded_values_are_the_saved_ones(tmp_path: Path) -> None:
    models = {family: saved(family, tmp_path / family) for family in LOADED}
    for found in run_ranks(_loaded, 4, tmp_path):
        for family, model in models.items():
            got, expected = found[family], dict(model.named_parameters())
            assert got.keys() == expected.keys(), family
            assert all(torch.equal(got[name], expected[name]) for name in expected), family


def test_loaded_model_computes_the_saved_one(tmp_path: Path) -> None:
    ids = torch.arange(16).unsqueeze(0)
    for family in FAMILIES:
        reference = saved(family, tmp_path / family).eval()
        model = shard.parallelize(build(family), Strategy())
        shard.load_weights(model, tmp_path / family)
        got, expected = model.eval()(ids).logits, reference(ids).logits
        torch.testing.assert_close(got, expected, rtol=0, atol=0, msg=lambda m, f=family: f"{f}: {m}")


class Peak:
    """The most anonymous memory that the process held in the block, above what it held at its start, in bytes."""

    def __enter__(self) -> Peak:
        self.start = self.now = self.most = self._resident()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.done.set()
        self.thread.join()
        self.bytes = self.most - self.start

    def _watch(self) -> None:
        while not self.done.wait(0.001):
            self.most = max(self.most, self._resident())

    def _resident(self) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no RssAnon")


WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 2048}


def _peak(rank: int, world: int, folder: str | None, axes: dict[str, int]) -> float:
    """The peak of loading or drawing weights, as a share of the whole model's bytes."""
    model = build("llama", **WIDE)
    whole = sum(p.numel() * 4 for p in model.parameters())
    shard.parallelize(model, Strategy(axes=axes, check=False))
    with Peak() as peak:
        if folder is None:
            shard.init_weights(model, seed=0)
        else:
            shard.load_weights(model, folder)
    assert all(bool(p.local.isfinite().all()) for p in shard.sharded(model).parameters())
    return peak.bytes / whole


@pytest.mark.parametrize("loads", [True, False])
def test_no_rank_holds_the_whole_model(loads: bool, tmp_path: Path) -> None:
    if loads:
        fields = {**FAMILIES["llama"], **WIDE}
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    folder = str(tmp_path) if loads else None
    [alone] = run_ranks(_peak, 1, folder, {})
    assert alone > 0.95  # the measure sees the whole model where there is one
    # A quarter is kept; drawing holds the largest tensor (4% of this model) twice on the way.
    assert max(run_ranks(_peak, 4, folder, {"shard": 2, "tensor": 2})) < 0.4


def test_a_folder_without_one_expert_is_refused(tmp_path: Path) -> None:
    saved("mixtral", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.5.w3.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    model = shard.parallelize(build("mixtral"), Strategy())
    with pytest.raises(
        CheckpointError, match=r"no tensor 'model.*experts.5.w3.weight', which .*gate_up_proj' is made of"
    ):
        shard.load_weights(model, tmp_path)


def test_another_model_s_folder_is_refused(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    model = shard.parallelize(build("llama", vocab_size=99), Strategy())
    with pytest.raises(CheckpointError, match=r"has shape \[131, 32\], the model needs \[99, 32\]"):
        shard.load_weights(model, tmp_path)
    model = shard.parallelize(build("qwen3"), Strategy())
    with pytest.raises(CheckpointError, match=r"no tensor .*q_norm"):
        shard.load_weights(model, tmp_path)


def test_damaged_or_absent_weights_are_named(tmp_path: Path) -> None:
    model = shard.parallelize(build("llama"), Strategy())
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor"):
        shard.load_weights(model, tmp_path)
    saved("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        shard.load_weights(model, tmp_path)
