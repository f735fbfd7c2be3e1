"""Experts of widths that torch's grouped product refuses, on one device."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

import hyper_parallel as hp
from harness.families import SHAPE
from hyper_parallel.errors import StrategyError


def test_odd_widths_train_on_one_device() -> None:
    torch.manual_seed(0)
    config = MixtralConfig(**{**SHAPE, "intermediate_size": 27, "num_local_experts": 4})
    model = AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm")
    plain = copy.deepcopy(model)
    plain.set_experts_implementation("eager")
    hp.parallelize(model, hp.Strategy())
    ids = torch.randint(0, 131, (2, 8))
    for one in (model, plain):
        one(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    wanted = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, atol=1e-6, rtol=1e-5)


def test_values_in_float64_are_not_rounded_without_a_word() -> None:
    with pytest.raises(StrategyError, match=r"'weight' is torch.float64, .* model.to\(torch.float32\)"):
        hp.parallelize(torch.nn.Linear(2, 2).double(), hp.Strategy())
