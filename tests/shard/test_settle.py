"""Rules that nobody gave: what weights between projections see, and which modules are left whole."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from harness.equivalence import build_model, draw_batch, family_config, one_device, run_cell
from harness.small_models import shrunken
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.plan import Plan, make_plan
from hyper_parallel.strategy import Strategy

TWO = {"axes": {"tensor": 2}}
SEQUENCE = {"axes": {"tensor": 2}, "sequence": True}
WHOLE_ATTENTION = {"axes": {"tensor": 2}, "rules": {"model.layers.*.self_attn.*_proj": "replicate"}}
# fmt: off
CASES = [
    # A norm over the features of all heads, and one over those of the whole MLP.
    ("olmo2", SEQUENCE), ("bitnet", TWO),
    # Numbers to learn in an activation function.
    ("apertus", TWO),
    # An MLP that keeps the largest of its features.
    ("gemma3n_text", TWO),
    # A fused projection whose parts the attention's own code orders, and one of which it keeps the lengths.
    ("codegen", SEQUENCE), ("gpt_bigcode", TWO),
    # Norms of each head, in an attention that the user leaves whole.
    ("qwen3", WHOLE_ATTENTION),
]
# fmt: on


@pytest.mark.parametrize(("family", "strategy"), CASES)
def test_every_gradient_is_that_of_one_device(family: str, strategy: Mapping[str, Any]) -> None:
    fields = shrunken(CONFIG_MAPPING[family]())
    batch = draw_batch(fields, rows=2, length=16)
    device = "cpu" if family == "apertus" else "meta"  # its numbers are no random ones, and have to be there
    one = one_device(fields, {}, batch, {"batch": 2}, 16, device)
    report = run_cell(
        family_config(fields, strategy, {"batch": 2}, 16), build_model(fields, device), batch, one
    )
    assert report.ok, report.failures


def plan_of(family: str, **strategy: Any) -> Plan:
    return make_plan(build_model(shrunken(CONFIG_MAPPING[family]())), Strategy(**{**TWO, **strategy}))


def test_a_plan_that_names_only_experts_leaves_attention_to_names() -> None:
    assert "model.layers.0.self_attn" in plan_of("granitemoe").regions


def test_what_cannot_be_split_is_left_whole_and_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        plan = plan_of("gemma3n_text")
    assert "Gemma3nTextMLP: it mixes features between its projections" in caplog.text
    assert {"model.layers.1.mlp", "model.layers.0.self_attn"} <= set(plan.regions)
    assert "model.layers.0.mlp" not in plan.regions
    with caplog.at_level(logging.WARNING):
        plan = plan_of("deepseek_v32")
    assert "nothing is known of the weights weight of 'indexer.wq_b'" in caplog.text
    assert not any("self_attn" in name for name in plan.regions)


def test_a_rule_for_what_sees_split_activations_needs_some() -> None:
    rules = {"model.layers.*.self_attn.*_proj": "replicate", "model.layers.*.self_attn.q_norm": "shared"}
    with pytest.raises(
        StrategyError, match=r"no projections around it are split; give it replicate: \{'model.layers.0"
    ):
        plan_of("qwen3", rules=rules)


def test_the_rule_norm_is_for_norms() -> None:
    with pytest.raises(StrategyError, match="the rule 'norm' is for norms"):
        plan_of("llama", rules={"model.layers.*.self_attn.v_proj": "norm"})


def test_layers_of_several_streams_are_not_split_along_the_batch() -> None:
    fields = shrunken(CONFIG_MAPPING["gemma3n_text"]())
    batch = draw_batch(fields, rows=2, length=16)
    one = one_device(fields, {}, batch, {"batch": 2}, 16)
    with pytest.raises(StrategyError, match="between layers; they have 4 dims"):
        run_cell(family_config(fields, SEQUENCE, {"batch": 2}, 16), build_model(fields), batch, one)
