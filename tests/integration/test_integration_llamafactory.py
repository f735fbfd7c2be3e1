"""LlamaFactory's fields as a Strategy: each means something, or is refused by name in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.errors import IntegrationError
from hyper_parallel.integration.llamafactory import HyperParallelArguments
from hyper_parallel.integration.llamafactory.arguments import (
    check_device,
    check_options,
    check_stages,
    keep_document_numbers,
    strategy_from_arguments,
    without_checkpointing,
)
from hyper_parallel.integration.llamafactory.error_lines import one_line_errors
from hyper_parallel.strategy import Strategy

AXES = ("pipeline", "replicate", "shard", "context", "tensor_x", "tensor_y", "expert")


def strategy(world: int = 8, checkpoints: bool = False, **fields: Any) -> Strategy:
    given = strategy_from_arguments(HyperParallelArguments.from_dict(fields), world, checkpoints=checkpoints)
    return Strategy.model_validate(given)


def refused(world: int = 8, **fields: Any) -> str:
    with pytest.raises(IntegrationError) as error:
        strategy(world, **fields)
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("fields", "axes"),
    [
        ({}, {"shard": 8}),
        ({"tp_size": 2}, {"shard": 4, "tensor_x": 2}),
        ({"cp_size": 2, "tp_size": 2}, {"shard": 2, "context": 2, "tensor_x": 2}),
        ({"fsdp_size": 2}, {"replicate": 4, "shard": 2}),
        ({"fsdp_size": 1, "tp_size": 8}, {"tensor_x": 8}),
        ({"ep_size": 4}, {"shard": 8, "expert": 4}),
        ({"pp_size": 4}, {"pipeline": 4, "shard": 2}),
        ({"pp_size": 2, "fsdp_size": 1, "tp_size": 2}, {"pipeline": 2, "replicate": 2, "tensor_x": 2}),
        (
            {"fsdp_size": 2, "cp_size": 2, "ep_size": 2, "efsdp_size": 2},
            {"replicate": 2, "shard": 2, "context": 2, "expert": 2},
        ),
    ],
)
def test_sizes(fields: dict[str, int], axes: dict[str, int]) -> None:
    found = strategy(**fields).axes
    assert {name: found.degree(name) for name in AXES} == {**dict.fromkeys(AXES, 1), **axes}
    assert found.product.startswith("pipeline") == (found.pipeline > 1)
    assert [axis for axis in found.order if axis != "tensor_y"] == [
        "replicate",
        "shard",
        "context",
        "tensor_x",
    ]


def test_sizes_that_do_not_fit_the_workers() -> None:
    assert refused(6, tp_size=4) == (
        "hyper_parallel_args: tp_size 4 = 4 does not divide the number of workers, 6; start a multiple of 4 workers, "
        "or make the sizes divide 6"
    )
    assert "fsdp_size 2 · cp_size 2 · tp_size 4 = 16 does not divide" in refused(
        fsdp_size=2, cp_size=2, tp_size=4
    )
    assert "pp_size 3 · cp_size 2 = 6 does not divide the number of workers, 8" in refused(
        pp_size=3, cp_size=2
    )
    assert "ep_size 3 does not divide fsdp_size · cp_size · tp_size = 8 · 1 · 1 = 8" in refused(ep_size=3)
    assert "8 · 1 · 1 ÷ 2 = 4 workers share an expert" in refused(ep_size=2, efsdp_size=8)


def test_dtypes_and_resharding() -> None:
    made = strategy(param_dtype="bf16", reduce_dtype="torch.float32", reshard_after_forward=False)
    assert (made.precision.compute, made.precision.reduce) == ("bfloat16", "float32")
    assert made.precision.model_fields_set == {"compute", "reduce"}
    assert made.memory.reshard_after_forward is False
    assert strategy().precision.model_fields_set == set()


def test_what_is_recomputed() -> None:
    budget = {"device": "1GiB", "host": "1GiB"}
    assert strategy().memory.recompute == "auto"
    assert strategy(activation_mode="recompute").memory.recompute == "layer"
    assert strategy(checkpoints=True).memory.recompute == "layer"
    assert strategy(checkpoints=True, activation_mode="swap").memory.recompute == "auto"
    assert strategy(checkpoints=True, memory=budget).memory.recompute == "auto"
    assert strategy(checkpoints=True, strategy="auto").memory.recompute == "auto"


def test_a_budget() -> None:
    made = strategy(memory={"device": "10GiB", "flash": "./spill"})
    assert (made.memory.device, made.memory.flash) == (10 * 2**30, "./spill")


def test_a_strategy_of_our_own(tmp_path: Path) -> None:
    file = tmp_path / "strategy.yaml"
    assert strategy_from_arguments(HyperParallelArguments(strategy=str(file)), 4) == file
    assert strategy(strategy={"axes": {"tensor": 4}}).axes.tensor == 4
    auto = strategy(strategy="auto", param_dtype="bfloat16")
    assert auto.open and auto.precision.compute == "bfloat16"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tp_sise": 2}, "unknown field 'tp_sise'; did you mean 'tp_size'?"),
        ({"pipeline": 2}, "unknown field 'pipeline'; the fields are tp_size, cp_size"),
        ({"tp_size": "two"}, "tp_size must be a whole number of at least 1; got 'two'"),
        ({"cp_size": 0}, "cp_size must be a whole number of at least 1; got 0"),
        ({"pp_size": 0}, "pp_size must be a whole number of at least 1; got 0"),
        ({"pp_size": 2, "activation_mode": "swap"}, "use activation_mode 'recompute', or set pp_size to 1"),
        ({"pp_size": 2, "memory": {"device": "1GiB", "host": "1GiB"}}, "pp_size 2 cannot be used with memory or"),
        ({"strategy": "a.yaml", "pp_size": 2}, "pp_size cannot stand beside strategy"),
        ({"ep_size": True}, "ep_size must be a whole number of at least 1; got True"),
        ({"fsdp_size": 1.5}, "fsdp_size must be a whole number of at least 1; got 1.5"),
        ({"token_dispatcher": "deepep"}, "token_dispatcher must be 'all_to_all', the only one"),
        ({"param_dtype": "float16"}, "param_dtype must be one of float32, bfloat16; got 'float16'; float16 would need"),
        ({"reduce_dtype": 16}, "reduce_dtype must be one of float32, bfloat16; got 16"),
        ({"reshard_after_forward": 2}, "reshard_after_forward must be true or false; got 2"),
        ({"activation_mode": "recomput"}, "must be one of none, recompute, swap; got 'recomput'; did you mean"),
        ({"activation_swap_inputs": "yes"}, "activation_swap_inputs must be true or false; got 'yes'"),
        ({"device_type": 1}, "device_type must be the name of a device; got 1"),
        ({"memory": "10GiB"}, "memory must say what a step may hold"),
        ({"memory": {"devise": 1}}, "memory has an unknown field 'devise'; did you mean 'device'?"),
        ({"memory": {"device": "1GiB", "host": "1GiB"}, "activation_mode": "swap"}, "keep one of them"),
        ({"strategy": 3}, "strategy must be the path of a file, its content, or 'auto'; got 3"),
        ({"strategy": "auto", "tp_size": 2}, "tp_size cannot stand beside strategy"),
        ({"strategy": "a.yaml", "param_dtype": "bf16", "tp_size": 2}, "tp_size and param_dtype cannot stand beside"),
    ],
)  # fmt: skip
def test_what_is_refused(fields: dict[str, Any], told: str) -> None:
    text = refused(**fields)
    assert text.startswith("hyper_parallel_args: ") and told in text


@pytest.mark.parametrize("option", ["use_dft_loss", "use_eaft_loss", "use_asft_loss", "compute_accuracy"])
def test_options_that_need_whole_logits_are_refused_with_stages(option: str) -> None:
    given = SimpleNamespace(**{option: True})
    check_stages(SimpleNamespace(), given, 1)
    with pytest.raises(IntegrationError, match=f"^{option}: the .* leave it out, or set pp_size to 1$"):
        check_stages(SimpleNamespace(), given, 2)


def test_text_is_not_generated_with_stages() -> None:
    args = SimpleNamespace(predict_with_generate=True)
    check_stages(args, SimpleNamespace(), 1)
    with pytest.raises(IntegrationError, match="evaluate by the loss, or set pp_size to 1"):
        check_stages(args, SimpleNamespace(), 2)


def test_where_the_fields_come_from(tmp_path: Path) -> None:
    def of(given: Any) -> HyperParallelArguments:
        return HyperParallelArguments.from_finetuning_args(SimpleNamespace(hyper_parallel_args=given))

    assert of(None) == HyperParallelArguments()
    assert of({"tp_size": 2}).tp_size == 2
    file = tmp_path / "hp.json"
    file.write_text(json.dumps({"cp_size": 4}))
    assert of(str(file)).cp_size == 4
    file.write_text('{"cp_sise": 4}')
    with pytest.raises(IntegrationError, match=f"^{file}: unknown field 'cp_sise'; did you mean 'cp_size'"):
        of(str(file))
    file.write_text("cp_size: 4")
    with pytest.raises(IntegrationError, match="is no JSON"):
        of(str(file))
    with pytest.raises(IntegrationError, match="cannot be read: No such file"):
        of(str(tmp_path / "none.json"))
    file.write_text("[1]")
    with pytest.raises(IntegrationError, match="must hold fields with values"):
        of(str(file))


def test_the_device() -> None:
    check_device(HyperParallelArguments(), "cpu")
    check_device(HyperParallelArguments(device_type="cpu"), "cpu")
    with pytest.raises(IntegrationError, match="device_type is 'npu', and this run trains on 'cpu'"):
        check_device(HyperParallelArguments(device_type="npu"), "cpu")
    with pytest.raises(IntegrationError, match="no device_type 'cdua'; did you mean 'cuda'"):
        check_device(HyperParallelArguments(device_type="cdua"), "cpu")


def test_an_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    others: list[str] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: others.append(str(error)))
    one_line_errors()
    one_line_errors()
    for error in (IntegrationError("a\n  b"), ValueError("c")):
        sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == "hyper-parallel: error: a b\n"
    assert others == ["c"]
    monkeypatch.setenv("RANK", "3")
    sys.excepthook(IntegrationError, IntegrationError("a"), None)
    assert capsys.readouterr().err == "hyper-parallel: error: rank 3: a\n"


class Options(SimpleNamespace):
    """LlamaFactory's arguments, of which most are off."""

    def __getattr__(self, name: str) -> bool:
        return False


@pytest.mark.parametrize(
    ("args", "finetuning", "told"),
    [
        ({"fp8": True}, {}, "fp8 cannot be used with use_hyper_parallel"),
        ({}, {"use_badam": True}, "use_badam changes which parameters are trained"),
        (
            {},
            {"use_galore": True},
            "use_galore: GaLore looks at whole matrices, of which each of the 2 workers",
        ),
        ({}, {"use_muon": True}, "use_muon: Muon looks at whole matrices"),
    ],
)
def test_options_that_are_refused(args: dict[str, bool], finetuning: dict[str, bool], told: str) -> None:
    with pytest.raises(IntegrationError, match=told):
        check_options(Options(**args), Options(**finetuning), nn.Linear(2, 2), 2)


def test_one_worker_has_whole_matrices() -> None:
    check_options(Options(), Options(use_muon=True), nn.Linear(2, 2), 1)


def test_passes_of_other_packages_are_refused() -> None:
    def forward(self: nn.Module) -> None: ...

    forward.__module__ = "liger_kernel.transformers.rms_norm"
    patched = type("Norm", (nn.Module,), {"forward": forward})
    with pytest.raises(IntegrationError, match="enable_liger_kernel puts passes of its own into Norm"):
        check_options(Options(), Options(), nn.Sequential(nn.Linear(2, 2), patched()), 2)


def test_checkpointing_and_masks_of_llamafactory() -> None:
    tiny = AutoConfig.for_model(
        "llama", vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = AutoModelForCausalLM.from_config(tiny)
    assert not without_checkpointing(model)
    model.gradient_checkpointing_enable()
    assert without_checkpointing(model) and not model.is_gradient_checkpointing
    collator = SimpleNamespace(block_diag_attn=True)
    keep_document_numbers(collator)
    keep_document_numbers(None)
    assert collator.block_diag_attn is False
