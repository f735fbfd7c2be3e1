"""What mixes positions in a way of its own is given all of them, where the sequence or the context axis splits them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, OPTConfig, OPTForCausalLM

from harness.equivalence import build_model, draw_batch, family_config, one_device, run_cell
from harness.small_models import shrunken
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.plan import make_plan
from hyper_parallel.strategy import Strategy

SEQUENCE = {"axes": {"tensor": 2}, "sequence": True}
CONTEXT = {"axes": {"context": 2}, "context": {"method": "ring"}}
BOTH = {"axes": {"context": 2, "tensor": 2}, "sequence": True}
TWO_DIMS = {"axes": {"tensor_x": 2, "tensor_y": 2}}

# fmt: off
CASES = [
    # An attention of its own, and a residual that is handed into it.
    ("bloom", SEQUENCE), ("bloom", TWO_DIMS),
    # Projections that lie in the layer itself, beside its residual.
    ("opt", SEQUENCE), ("opt", TWO_DIMS),
    # A recurrence, and one with its time shifts in the feed-forward too.
    ("mamba", SEQUENCE), ("rwkv", CONTEXT),
    # Layers of either kind.
    ("qwen3_next", CONTEXT),
    # The context axis splits what the tensor axis has split already.
    ("bloom", BOTH),
]
# fmt: on


@pytest.mark.parametrize(("family", "strategy"), CASES)
def test_every_gradient_is_that_of_one_device(family: str, strategy: Mapping[str, Any]) -> None:
    fields = shrunken(CONFIG_MAPPING[family]())
    _check(fields, strategy)


@pytest.mark.parametrize("strategy", [CONTEXT, BOTH], ids=["context", "context and tensor"])
def test_dropout_between_draws_what_one_device_draws(strategy: Mapping[str, Any]) -> None:
    _check({**shrunken(CONFIG_MAPPING["gptj"]()), "resid_pdrop": 0.2}, strategy)


def _check(fields: Mapping[str, Any], strategy: Mapping[str, Any]) -> None:
    batch = draw_batch(fields, rows=2, length=16)
    one = one_device(fields, {}, batch, {"batch": 2}, 16)
    report = run_cell(family_config(fields, strategy, {"batch": 2}, 16), build_model(fields), batch, one)
    assert report.ok, report.failures


def test_it_is_said_what_is_not_split(caplog: pytest.LogCaptureFixture) -> None:
    model = build_model(shrunken(CONFIG_MAPPING["mamba"]()))
    with caplog.at_level(logging.WARNING):
        plan = make_plan(model, Strategy(**CONTEXT))
    assert plan.context is not None
    assert plan.context.gathered == ("backbone.layers.0.mixer", "backbone.layers.1.mixer")
    assert "all positions go through MambaMixer" in caplog.text


def test_weights_between_projections_of_a_layer_are_refused() -> None:
    small = {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "vocab_size": 99,
    }
    with torch.device("meta"):
        model = OPTForCausalLM(OPTConfig(**small, word_embed_proj_dim=32, dropout=0.0))
        model.model.decoder.layers[0].between = nn.LayerNorm(48)
    with pytest.raises(
        StrategyError, match=r"layers.0.between' have one element for each of the 48 features"
    ):
        make_plan(model, Strategy(axes={"tensor": 2}))
