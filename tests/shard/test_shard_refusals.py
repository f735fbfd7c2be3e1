"""What cannot be right is refused with the reason, before anything is computed."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, build
from torch import nn
from transformers import OPTConfig, OPTForCausalLM

from hyper_parallel import shard
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.plan import make_plan
from hyper_parallel.strategy import Strategy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


@pytest.mark.parametrize(
    ("overrides", "strategy", "message"),
    [
        ({}, {"axes": {"tensor": 3}}, "4 attention heads cannot be split over axes.tensor = 3"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 48},
            {"axes": {"tensor": 4}},
            "3 key-value heads over axes.tensor = 4: one must divide the other",
        ),
        ({}, {"sequence": True}, "tensor axis, which has degree 1"),
        ({}, {"axes": {"tensor": 2}, "rules": {"*.mpl.*": "replicate"}}, "matches no module"),
        (
            {},
            {"axes": {"tensor": 2}, "rules": {"model.layers.*.self_attn": "replicate"}},
            "no module that holds weights",
        ),
        ({}, {"axes": {"tensor": 2}, "rules": {"*.mlp.down_proj": "replicate"}}, "use colwise_gather"),
        (
            {},
            {"axes": {"tensor": 2}, "rules": {"*.input_layernorm": "colwise_gather"}},
            "splits nn.Linear and Conv1D only",
        ),
        ({}, {"precision": {"modules": {"*.nrom": "float32"}}}, "matches no module"),
        (
            {"tie_word_embeddings": True},
            {"axes": {"tensor": 2}, "rules": {"lm_head": "replicate"}},
            "is tied to 'model.embed_tokens.weight', which is split",
        ),
    ],
)
def test_llama(overrides: dict, strategy: dict, message: str) -> None:  # type: ignore[type-arg]
    def spread() -> None:
        model = build("llama", **overrides)
        make_plan(model, Strategy(**strategy))
        shard.parallelize(model, Strategy(**strategy))

    with pytest.raises(StrategyError) as caught:
        spread()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_random_numbers_that_would_differ_between_strategies() -> None:
    small = {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "vocab_size": 99,
    }
    with torch.device("meta"):
        model = OPTForCausalLM(OPTConfig(**small, word_embed_proj_dim=32, layerdrop=0.1))
    with pytest.raises(StrategyError, match=r"decoder.layerdrop is 0.1: .* set it to 0 in model.config"):
        shard.parallelize(model, Strategy())
    with pytest.raises(StrategyError, match="'0' is a Dropout2d"):
        shard.parallelize(nn.Sequential(nn.Dropout2d(0.5)), Strategy())


def test_a_plain_module_needs_rules_for_the_tensor_axis() -> None:
    with pytest.raises(StrategyError, match=r"give strategy.rules"):
        make_plan(Block(), Strategy(axes={"tensor": 2}))


def test_sequence_is_refused_for_a_plain_module() -> None:
    strategy = Strategy(axes={"tensor": 2}, sequence=True, rules={"up": "colwise", "down": "rowwise"})
    with pytest.raises(StrategyError, match="Transformers models only"):
        make_plan(Block(), strategy)


def test_more_workers_than_there_are() -> None:
    with pytest.raises(StrategyError, match=r"multiply to 2, but this process is alone"):
        shard.parallelize(build("llama"), Strategy(axes={"shard": 2}))


def test_twice() -> None:
    model = shard.parallelize(build("llama"), Strategy())
    with pytest.raises(StrategyError, match="parallelized already"):
        shard.parallelize(model, Strategy())


def test_dropout_without_a_step_is_refused() -> None:
    from families import batch, loss_of

    from hyper_parallel.errors import HyperParallelError

    model = shard.parallelize(build("gpt2"), Strategy())
    shard.init_weights(model, seed=0)
    with pytest.raises(HyperParallelError, match="micro_batch"):
        loss_of(model, batch(), 1)
    model.eval()
    assert loss_of(model, batch(), 1).isfinite()


def test_an_uninitialised_buffer_is_refused() -> None:
    class Odd(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(8))

    with torch.device("meta"):
        model = Odd()
    shard.parallelize(model, Strategy())
    with pytest.raises(StrategyError, match="'scale' is not initialised by the model's own code"):
        shard.init_weights(model, seed=0)


def test_every_family_has_a_plan_that_splits_most_of_it() -> None:
    for family in FAMILIES:
        plan = make_plan(build(family), Strategy(axes={"tensor": 2}))
        # A vision tower is whole on every rank.
        layouts = [p.layout for name, p in plan.parameters.items() if ".visual." not in name]
        split = [torch.Size(layout.shape).numel() for layout in layouts if "tensor_x" in layout.split_axes]
        assert sum(split) / sum(torch.Size(layout.shape).numel() for layout in layouts) > 0.9, family
