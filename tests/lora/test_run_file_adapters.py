"""Adapters that a run file declares: what is built, trained and planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_parallel.config import RunConfig, from_dict
from hyper_parallel.errors import ConfigError
from hyper_parallel.integration.parallel_run import _adapter
from hyper_parallel.planner.auto.open_axes import workload_of
from hyper_parallel.step.build import build, fill, unsharded

LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def run(tmp_path: Path, adapter: Any, **strategy: Any) -> RunConfig:
    return from_dict(
        {
            "version": 1,
            "out": str(tmp_path),
            "model": {"config": LLAMA, "adapter": adapter},
            "data": {"train": "python-stdlib", "sequence": 32, "tokenizer": {"vocab_size": 300}},
            "train": {"batch": 2, "engine": "eager"},
            "strategy": {"axes": {}, **strategy},
        },
        source="test",
    )


@pytest.mark.parametrize(
    "targets", ["all-linear", ["q_proj", "v_proj"], ["o_proj", "down_proj", "gate_proj"]]
)
def test_the_planner_counts_the_parameters_that_peft_trains(tmp_path: Path, targets: Any) -> None:
    config = run(tmp_path, {"rank": 4, "targets": targets})
    model, _ = unsharded(config)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    work = workload_of(config)
    assert work.trained_parameters == trained
    frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    assert work.shape.parameters == frozen
    assert work.adapter is not None
    assert work.adapter.base == "fp32"


def test_adapters_begin_with_no_effect_and_alone_have_gradients(tmp_path: Path) -> None:
    config = run(tmp_path, {"rank": 4, "targets": ["q_proj"]})
    built = build(config)
    fill(built, config, torch.device("cpu"))
    values = dict(built.model.named_parameters())
    first = [value for name, value in values.items() if "lora_A" in name]
    second = [value for name, value in values.items() if "lora_B" in name]
    assert len(first) == len(second) == 2
    assert all(value.detach().abs().sum() > 0 for value in first)
    assert not any(value.detach().any() for value in second)
    assert {name for name, value in values.items() if value.requires_grad} == {
        name for name in values if "lora_" in name
    }
    tokens = torch.arange(8).reshape(1, 8)
    built.model(input_ids=tokens, labels=tokens).loss.backward()
    assert {name for name, value in values.items() if value.grad is not None} == {
        name for name in values if "lora_" in name
    }


def test_the_planner_is_told_the_adapters_of_a_trainers_model(tmp_path: Path) -> None:
    model, _ = unsharded(run(tmp_path, {"rank": 4, "targets": ["v_proj", "q_proj"]}))
    assert _adapter(model) == {"rank": 4, "targets": ["q_proj", "v_proj"]}
    assert _adapter(unsharded(run(tmp_path, None))[0]) is None


def test_layers_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.adapter\.targets: .*nothing_such"):
        unsharded(run(tmp_path, {"rank": 4, "targets": ["nothing_such"]}))
    with pytest.raises(ConfigError, match="give all-linear, attention, qkv, mlp"):
        workload_of(run(tmp_path, {"rank": 4, "targets": ["nothing_such"]}))
    assert workload_of(run(tmp_path, {"rank": 4, "targets": "all-linear"})).adapter is not None
    with pytest.raises(ConfigError, match="rank"):
        run(tmp_path, {"rank": 0})


def test_rslora_scales_by_the_root_of_the_rank(tmp_path: Path) -> None:
    for rslora, scale in ((False, 12 / 9), (True, 12 / 3)):
        model, _ = unsharded(run(tmp_path, {"rank": 9, "alpha": 12, "rslora": rslora}))
        scales = {value for m in model.modules() for value in _scales(m)}
        assert scales == {scale}


def _scales(module: torch.nn.Module) -> list[float]:
    found = getattr(module, "scaling", None)
    return list(found.values()) if isinstance(found, dict) else []
