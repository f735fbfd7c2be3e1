"""What the plan says of adapted layers, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hyper_parallel import shard
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.plan import make_plan
from hyper_parallel.strategy import Strategy
from lora.adapted import adapt
from shard.families import build

TENSOR = Strategy(axes={"tensor": 2})


def test_adapters_are_split_as_what_they_adapt() -> None:
    plan = make_plan(adapt(build("phi3")), TENSOR).parameters
    layer = "base_model.model.model.layers.0"

    def shown(name: str) -> tuple[str, tuple[str, ...]]:
        parameter = plan[f"{layer}.{name}.weight"]
        return str(parameter.computed), parameter.summed

    # Query, key and value lie in one matrix: B is split part by part, as the base is.
    assert "tensor_x" in shown("self_attn.qkv_proj.base_layer")[0]
    base = plan[f"{layer}.self_attn.qkv_proj.base_layer.weight"].layout
    b = plan[f"{layer}.self_attn.qkv_proj.lora_B.default.weight"].layout
    assert (b.dims[0], b.parts[0]) == (base.dims[0], base.parts[0])
    assert shown("self_attn.qkv_proj.lora_A.default") == ("[3, 32]", ("tensor_x",))
    assert shown("self_attn.o_proj.lora_A.default") == ("[3, 32/tensor_x]", ())
    assert shown("self_attn.o_proj.lora_B.default") == ("[32, 3]", ("tensor_x",))


def test_rules_are_written_for_the_model_without_adapters() -> None:
    rules = {"model.layers.0.mlp.*_proj": "replicate"}
    plan = make_plan(adapt(build("llama")), TENSOR.model_copy(update={"rules": rules}))
    split = {name for name, p in plan.parameters.items() if "tensor_x" in p.layout.split_axes}
    assert not any(".layers.0.mlp." in name for name in split)
    assert any(".layers.1.mlp." in name for name in split)


@pytest.mark.parametrize(
    ("settings", "strategy", "message"),
    [
        ({"target_modules": ["embed_tokens", "q_proj"]}, TENSOR, "embed_tokens' is LoRA on an embedding"),
        ({"target_modules": ["q_proj"], "use_dora": True}, TENSOR, "q_proj' is a variant of LoRA"),
        (
            {"target_modules": ["o_proj"], "lora_bias": True},
            TENSOR,
            "o_proj' is rowwise and its adapter has a bias",
        ),
        (
            {"target_modules": ["q_proj"], "target_parameters": ["mlp.down_proj.weight"]},
            TENSOR,
            "on a parameter",
        ),
    ],
)
def test_refused(settings: dict[str, Any], strategy: Strategy, message: str) -> None:
    with pytest.raises(StrategyError) as caught:
        make_plan(adapt(build("llama"), **settings), strategy)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_adapters_of_experts_are_refused() -> None:
    model = get_peft_model(build("mixtral"), LoraConfig(r=2, target_parameters=["experts.down_proj"]))
    with pytest.raises(StrategyError, match=r"experts' is LoRA on a parameter"):
        make_plan(model, Strategy(axes={"shard": 2}))


def test_dropout_of_what_is_no_row_of_the_batch_is_refused() -> None:
    from shard.families import step

    model = adapt(build("qwen2.5-vl"), target_modules=r".*visual.*\.qkv", lora_dropout=0.1)
    shard.parallelize(model, Strategy())
    shard.init_weights(model, seed=0)
    with pytest.raises(StrategyError, match=r"drops activations of 256 rows, but the batch has 8"):
        step(model, Strategy())


def test_a_parallelized_model_is_still_peft_s() -> None:
    from peft import PeftModel

    model = adapt(build("llama"))
    names = [name for name, _ in model.named_parameters()]
    assert shard.parallelize(model, Strategy()) is model
    assert isinstance(model, PeftModel)
    assert [name for name, _ in model.named_parameters()] == names
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert 0 < len(trainable) < len(names)
    assert all(isinstance(p, torch.nn.Parameter) for p in trainable)
