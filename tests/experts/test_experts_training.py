"""A run that trains a mixture of experts: the load's metric, the auxiliary loss, the correction of biases."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from moe import batch, filled

from hyper_parallel.config.train import AdamWConfig, ScheduleConfig
from hyper_parallel.errors import ConfigError
from hyper_parallel.shard import sharded
from hyper_parallel.step.batches import MicroBatch, StepBatch
from hyper_parallel.step.lr_schedule import schedule
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.step.recipe import Recipe, StepResult
from hyper_parallel.step.train_step import Stepper
from hyper_parallel.strategy import Strategy
from hyper_parallel.train.trainer import Trainer
from train.tiny_run import run_config


def one_step(family: str, rate: float = 0.0, **overrides: Any) -> tuple[torch.nn.Module, StepResult]:
    model = filled(family, Strategy(), **overrides)
    whole = batch()
    positions = torch.arange(16).expand(8, 16)
    micro = [
        MicroBatch(whole["input_ids"][at], whole["labels"][at], positions[at], torch.arange(8)[at])
        for at in (slice(0, 4), slice(4, 8))
    ]
    tokens = (whole["labels"] != -100).sum().float()
    stepper = Stepper(
        Recipe(
            model,
            sharded(model),
            build_optimizer(model, AdamWConfig()),
            schedule(ScheduleConfig(name="constant"), 1),
            seed=0,
            clip=None,
            router_bias_rate=rate,
        )
    )
    stepper.begin(StepBatch(0, list(range(8)), micro, tokens))
    return model, stepper.run(load_next=None, memory=0.0)


def test_imbalance_is_a_metric_of_models_with_experts() -> None:
    _, result = one_step("mixtral")
    assert result.expert_imbalance is not None and 1 < result.expert_imbalance < 8
    # A memory budget knows of no tensor that outlives the step with its result.
    assert not any(isinstance(value, torch.Tensor) for value in vars(result).values())


def test_auxiliary_loss_is_part_of_the_step() -> None:
    _, without = one_step("mixtral")
    _, added = one_step("mixtral", output_router_logits=True, router_aux_loss_coef=0.1)
    # Three of eight experts for each token: the loss of an even load is 3.
    assert 0.29 < added.loss - without.loss < 0.4
    assert added.grad_norm != without.grad_norm


def test_biases_are_corrected_once_a_step_and_only_if_asked() -> None:
    start = copy.deepcopy(dict(filled("deepseek-v3", Strategy()).named_buffers()))
    name = next(n for n in start if n.endswith("e_score_correction_bias"))
    left, _ = one_step("deepseek-v3")
    assert torch.equal(left.get_buffer(name), start[name])
    corrected, _ = one_step("deepseek-v3", rate=0.25)
    change = corrected.get_buffer(name) - start[name]
    assert set(change.abs().round(decimals=5).tolist()) <= {0.0, 0.25}
    assert change.min() < 0 < change.max()


MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}


def test_a_run_records_the_imbalance(tmp_path: Path) -> None:
    config = run_config(tmp_path, model={"config": MIXTRAL}, train={"steps": 2})
    Trainer(config).run()
    lines = [json.loads(line) for path in Path(config.out).glob("*.jsonl") for line in path.open()]
    recorded = [line["expert_imbalance"] for line in lines if "expert_imbalance" in line]
    assert len(recorded) == 2 and all(1 <= ratio <= 4 for ratio in recorded)
    *_, last = (Path(config.out) / "experts.jsonl").read_text().splitlines()
    loads = json.loads(last)["loads"]["model.layers.0.mlp.experts"]
    rows = config.train.batch * config.data.sequence * 2
    assert len(loads) == 4 and sum(loads) == rows and max(loads) / (rows / 4) == pytest.approx(recorded[-1])


def test_a_rate_without_biases_is_refused(tmp_path: Path) -> None:
    config = run_config(tmp_path, model={"config": MIXTRAL}, train={"router_bias_rate": 0.001})
    with pytest.raises(ConfigError, match="no router of MixtralForCausalLM has a bias"):
        Trainer(config).run()
