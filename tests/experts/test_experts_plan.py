"""Which layouts experts get, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from moe import build
from pydantic import ValidationError
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.errors import IntegrationError, StrategyError
from hyper_parallel.integration.trainer_arguments import check_strategy
from hyper_parallel.layout import Mesh
from hyper_parallel.shard.plan import make_plan
from hyper_parallel.strategy import Strategy

UP, DOWN = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"


def layouts(family: str, overrides: dict[str, Any] | None = None, **strategy: Any) -> tuple[str, str]:
    plan = make_plan(build(family, **(overrides or {})), Strategy(**strategy))
    return str(plan.parameters[UP].layout), str(plan.parameters[DOWN].layout)


def test_layouts() -> None:
    assert layouts("mixtral", axes={"shard": 4, "expert": 2}) == (
        "[8/expert/expert_shard, 46, 32]",
        "[8/expert/expert_shard, 32, 23]",
    )
    assert layouts("mixtral", axes={"tensor": 2, "shard": 3}) == (
        "[8/shard, (23+23)/tensor_x, 32]",
        "[8/shard, 32, 23/tensor_x]",
    )
    assert layouts(
        "mixtral", axes={"tensor": 2, "shard": 4, "expert": 2}, rules={"*.experts": "expert_tensor"}
    ) == ("[8/expert/expert_shard, (23+23)/tensor_x, 32]", "[8/expert/expert_shard, 32, 23/tensor_x]")
    # Turns of gate and up: 24 pairs are divided, 23 are stored whole.
    assert (
        layouts("gpt-oss", {"intermediate_size": 24}, axes={"tensor": 2})[0] == "[8/context, 32, 48/tensor_x]"
    )
    assert layouts("gpt-oss", axes={"tensor": 2}) == ("[8/context, 32, 46]", "[8/context, 23/tensor_x, 32]")


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_releases_that_do_not_say_how_gate_and_up_lie(family: str) -> None:
    """Early releases of Transformers 5 leave it out; the layouts are the same."""
    model = build(family, intermediate_size=24)
    told = make_plan(model, Strategy(axes={"tensor": 2})).parameters[UP].layout
    experts = [module for module in model.modules() if hasattr(module, "is_concatenated")]
    for module in experts:
        del module.is_concatenated
        if hasattr(module, "has_post_expert_norm"):
            del module.has_post_expert_norm
    assert experts and make_plan(model, Strategy(axes={"tensor": 2})).parameters[UP].layout == told


def test_fewer_experts_than_ranks_that_share_their_storage_split_the_next_dim() -> None:
    few = {"num_local_experts": 4, "intermediate_size": 24}
    assert layouts("mixtral", few, axes={"shard": 8, "expert": 2}) == (
        "[4/expert, 48/expert_shard, 32]",
        "[4/expert, 32/expert_shard, 24]",
    )
    uneven = {"num_local_experts": 4, "intermediate_size": 23}
    assert layouts("mixtral", uneven, axes={"shard": 8, "expert": 2})[0] == "[4/expert/expert_shard, 46, 32]"


def test_expert_leaves_tensor_to_features_by_rule_only() -> None:
    axes = {"shard": 2, "tensor": 2, "expert": 2}
    folds = dict(Mesh.of(Strategy(axes=axes)).folds)
    assert set(folds["expert"].over) == {"shard", "context", "tensor_y", "tensor_x"}
    folds = dict(Mesh.of(Strategy(axes=axes, rules={"*.experts": "expert_tensor"})).folds)
    assert set(folds["expert"].over) == {"shard", "context"}


def test_families_with_experts_train_without_tensor_although_their_plan_has_more_rules() -> None:
    make_plan(build("mixtral"), Strategy(axes={"shard": 2}))
    config = AutoConfig.for_model("deepseek_v2", hidden_size=32, num_hidden_layers=1)
    assert config.base_model_tp_plan  # rules that the tensor axes may not know are no matter here


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("mixtral", {"num_local_experts": 6}, {"axes": {"shard": 4, "expert": 4}}, "6 experts.*expert = 4"),
    (
        "mixtral",
        {},
        {"axes": {"shard": 2, "tensor": 2, "expert": 4}, "rules": {"*.experts": "expert_tensor"}},
        "shard · context = 2",
    ),
    ("mixtral", {}, {"axes": {"tensor": 2}, "rules": {"*.experts": "colwise"}}, "expert_tensor or replicate"),
    ("mixtral", {}, {"axes": {"tensor": 2}, "rules": {"*.experts": "expert"}}, "axes.expert, which is 1"),
    ("mixtral", {}, {"axes": {"shard": 2}, "rules": {"*.experts": "expert_tensor"}}, "degree 1"),
    ("mixtral", {}, {"axes": {"tensor": 2}, "rules": {"*.q_proj": "expert"}}, "is a Linear"),
    (
        "mixtral",
        {},
        {"axes": {"shard": 2, "expert": 2}, "rules": {"*.experts": "replicate"}},
        "is to be replicated",
    ),
    (
        "mixtral",
        {},
        {
            "axes": {"shard": 2, "tensor": 2, "expert": 2},
            "rules": {"model.layers.0.mlp.experts": "expert_tensor"},
        },
        "got both",
    ),
    ("mixtral", {}, {"axes": {"shard": 2}, "expert_replicas": {"*.experts": [1]}}, "needs axes.expert"),
    (
        "mixtral",
        {},
        {"axes": {"shard": 2, "expert": 2}, "expert_replicas": {"*.experts": [8]}},
        "8 experts, from 0; got 8",
    ),
    (
        "mixtral",
        {},
        {"axes": {"shard": 2, "expert": 2}, "expert_replicas": {"*.expert": [1]}},
        "matches no module",
    ),
    ("mixtral", {}, {"axes": {"shard": 2}, "expert_balance": {}}, "expert_balance needs axes.expert"),
    (
        "mixtral",
        {},
        {"axes": {"shard": 2, "expert": 2}, "expert_balance": {"replicas": 9}},
        "has 8 experts, and 9 are to have replicas; use at most 8",
    ),
    ("mixtral", {"router_jitter_noise": 0.1}, {"axes": {"shard": 2}}, "router_jitter_noise"),
]


@pytest.mark.parametrize(("family", "overrides", "strategy", "reason"), REFUSED)
def test_refused_with_the_reason(
    family: str, overrides: dict[str, Any], strategy: dict[str, Any], reason: str
) -> None:
    with pytest.raises(StrategyError, match=reason):
        make_plan(build(family, **overrides), Strategy(**strategy))


def test_a_model_without_experts_is_refused() -> None:
    config = AutoConfig.for_model("llama", hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    with pytest.raises(StrategyError, match="LlamaForCausalLM has no experts"):
        make_plan(AutoModelForCausalLM.from_config(config), Strategy(axes={"shard": 2, "expert": 2}))


def test_an_expert_has_replicas_once() -> None:
    with pytest.raises(ValidationError, match="names an expert twice"):
        Strategy(axes={"shard": 2, "expert": 2}, expert_replicas={"*.experts": [1, 1]})


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        ({"expert_replicas": {"*.experts": [1]}}, "leave one out"),
        ({"axes": {"shard": "auto"}}, "write the degrees"),
        ({"axes": {"pipeline": 2, "shard": 2, "expert": 2}}, "axes.pipeline is 2"),
        ({"memory": {"device": "1GiB", "host": "1GiB"}}, "leave memory.device out"),
        ({"expert_balance": {"limit": 1.0}}, "greater than 1"),
        ({"expert_balance": {"every": 0}}, "greater than or equal to 1"),
    ],
)
def test_what_does_not_go_with_balanced_experts_is_refused(declared: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        Strategy(**{"axes": {"shard": 2, "expert": 2}, "expert_balance": {}, **declared})


def test_a_trainer_refuses_balanced_experts() -> None:
    strategy = Strategy(axes={"shard": 2, "expert": 2}, expert_balance={})
    with pytest.raises(IntegrationError, match="expert_balance moves experts between the steps"):
        check_strategy(strategy, SimpleNamespace(args=None))
