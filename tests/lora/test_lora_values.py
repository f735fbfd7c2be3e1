"""Values of adapters: drawn as peft draws them, whatever the strategy; the base model's are those without adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from harness import run_ranks
from hyper_parallel import shard
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.lora_adapters import name_in_base
from hyper_parallel.strategy import Strategy
from lora.adapted import adapt
from shard.families import FAMILIES, build

AXES = {"shard": 2, "tensor": 2}


def _values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    handle = shard.sharded(model)
    return {p.name: handle.gather(p.local, p.layout) for p in handle.parameters()}


def _drawn(rank: int, world: int, init: object) -> dict[str, torch.Tensor]:
    model = adapt(build("llama"), init_lora_weights=init)
    shard.parallelize(model, Strategy(axes=AXES, check=False) if world > 1 else Strategy())
    shard.init_weights(model, seed=5)
    return _values(model)


def test_new_values_are_the_same_under_any_strategy() -> None:
    alone = _drawn(0, 1, "gaussian")
    for got in run_ranks(_drawn, 4, "gaussian"):
        assert got.keys() == alone.keys()
        assert all(torch.equal(got[name], alone[name]) for name in alone)


@pytest.mark.parametrize("init", [True, "gaussian"])
def test_new_values_are_distributed_as_peft_s(init: object) -> None:
    alone = _drawn(0, 1, init)
    a = alone["base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"]
    b = alone["base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"]
    assert not b.any()
    # Uniform within 1 / √in, or normal with deviation 1 / r; `in` is 32 and r is 3.
    if init is True:
        assert float(a.abs().max()) <= 32**-0.5 < float(a.abs().max()) * 1.2
    else:
        assert 0.2 < float(a.std()) < 0.5
    other = alone["base_model.model.model.layers.1.self_attn.q_proj.lora_A.default.weight"]
    assert not torch.equal(a, other)


def test_the_base_model_has_the_values_that_it_has_without_adapters() -> None:
    plain = shard.parallelize(build("llama"), Strategy())
    shard.init_weights(plain, seed=5)
    adapted = adapt(build("llama"))
    names = {name_in_base(name, adapted): name for name, _ in adapted.named_parameters()}
    values = _drawn(0, 1, True)
    for name, value in _values(plain).items():
        assert torch.equal(values[names[name]], value), name


def _loaded(rank: int, world: int, folder: str) -> torch.Tensor:
    model = adapt(build("qwen3"), init_lora_weights=True)
    shard.parallelize(model, Strategy(axes=AXES, check=False))
    shard.load_weights(model, folder, seed=3)
    with torch.no_grad():
        return model.eval()(torch.arange(16).unsqueeze(0)).logits


def test_a_folder_of_the_base_model_loads_into_the_adapted_one(tmp_path: Path) -> None:
    fields = dict(FAMILIES["qwen3"])
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    reference.save_pretrained(tmp_path)
    expected = reference.eval()(torch.arange(16).unsqueeze(0)).logits
    for logits in run_ranks(_loaded, 4, str(tmp_path)):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)


def _saved(rank: int, world: int, folder: str) -> dict[str, torch.Tensor]:
    model = adapt(build("llama"))
    shard.parallelize(model, Strategy(axes=AXES, check=False))
    shard.init_weights(model, seed=5)
    adapters = {name: value for name, value in _values(model).items() if "lora_" in name}
    if rank == 0:
        model.save_pretrained(folder, state_dict=adapters)
    return adapters


def test_peft_loads_what_the_ranks_gathered_and_saved(tmp_path: Path) -> None:
    adapters = run_ranks(_saved, 4, str(tmp_path))[0]
    loaded = dict(
        PeftModel.from_pretrained(build("llama").to_empty(device="cpu"), tmp_path).named_parameters()
    )
    assert all(torch.equal(loaded[name], value) for name, value in adapters.items())


def test_values_that_need_the_base_s_are_refused() -> None:
    model = adapt(build("llama"), init_lora_weights=True)
    model.peft_config["default"].init_lora_weights = "olora"
    shard.parallelize(model, Strategy())
    with pytest.raises(
        StrategyError, match="init_lora_weights='olora' is computed from the base model's values"
    ):
        shard.init_weights(model, seed=0)
