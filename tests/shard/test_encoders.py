"""Encoders and encoder-decoders in a loop of one's own: every gradient is that of one device."""

from __future__ import annotations

from typing import Any

import encoders
import pytest
from torch import nn

from harness import run_ranks
from hyper_parallel import shard
from hyper_parallel.errors import StrategyError
from hyper_parallel.shard.plan import make_plan
from hyper_parallel.strategy import Strategy
from hyper_parallel.verify.report import compare

AXES: dict[str, dict[str, int]] = {
    "shard 2": {"shard": 2},
    "tensor 2": {"tensor": 2},
    "tensor 4": {"tensor": 4},
    "shard 2 tensor 2": {"shard": 2, "tensor": 2},
}
SAMPLE = {
    ("bert", "tensor 2"),
    ("t5", "shard 2 tensor 2"),
    ("clip-vision", "tensor 2"),
    ("whisper", "tensor 4"),
}
NAMES = [name for name in encoders.MODELS if name != "biogpt"]


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        pytest.param(name, axes, marks=[] if (name, axes) in SAMPLE else [pytest.mark.matrix])
        for name in NAMES
        for axes in AXES
    ],
)
def test_every_gradient_is_that_of_one_device(name: str, axes: str) -> None:
    report = encoders.report(name, Strategy(axes=AXES[axes]))
    assert report.ok, report.failures
    split = [p.name for p in report.parameters if "tensor" in p.layout]
    assert ("tensor" in axes) == bool(split)
    if "tensor" in axes:
        # Attention and MLP of every layer of every stack.
        wanted = {"query": 4, "q": 4, "q_proj": 4, "q_lin": 4}
        queries = [n for n, _ in encoders.build(name).named_modules() if n.rpartition(".")[2] in wanted]
        assert queries and all(f"{n}.weight" in split for n in queries)


_RATES: dict[str, Any] = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.3}
_RATES_OF_PAIRS: dict[str, Any] = {"dropout": 0.1, "attention_dropout": 0.3, "activation_dropout": 0.1}


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("bert", _RATES),
        ("t5", {"dropout_rate": 0.1}),
        pytest.param("bert", {**_RATES, "attn_implementation": "eager"}, marks=pytest.mark.matrix),
        pytest.param("vit", _RATES, marks=pytest.mark.matrix),
        pytest.param("bart", _RATES_OF_PAIRS, marks=pytest.mark.matrix),
        pytest.param("bart", {**_RATES_OF_PAIRS, "attn_implementation": "eager"}, marks=pytest.mark.matrix),
        pytest.param("whisper", _RATES_OF_PAIRS, marks=pytest.mark.matrix),
        pytest.param("distilbert", {"dropout": 0.1, "attention_dropout": 0.3}, marks=pytest.mark.matrix),
    ],
)
def test_what_they_drop_is_the_same_where_heads_are_split(name: str, rates: dict[str, Any]) -> None:
    report = encoders.report(name, Strategy(axes={"tensor": 2}), **rates)
    assert report.ok, report.failures


def _worker(rank: int, world: int, names: list[str]) -> list[list[str]]:
    found = []
    for name in names:
        batch = encoders.MODELS[name][2]()
        one = encoders.step(
            shard.parallelize(encoders.build(name), Strategy(), alone=True), Strategy(), batch
        )
        strategy = Strategy(axes={"shard": 2})
        many = encoders.step(shard.parallelize(encoders.build(name), strategy), strategy, batch)
        found.append(compare(one, many, name, "gloo", "float32").failures)
    return found


def test_real_workers() -> None:
    assert run_ranks(_worker, 2, ["bert", "t5", "vit"]) == [[[], [], []]] * 2


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ({"axes": {"tensor": 2}, "sequence": True}, "decoder-only language models, and BertForMaskedLM"),
        ({"axes": {"tensor_x": 2, "tensor_y": 2}}, "decoder-only language models, and BertForMaskedLM"),
        ({"axes": {"context": 2}}, "decoder-only language models, and BertForMaskedLM has an encoder"),
        ({"axes": {"tensor": 3}}, "4 attention heads cannot be split over axes.tensor = 3"),
    ],
)
def test_what_is_refused(strategy: dict[str, Any], said: str) -> None:
    with pytest.raises(StrategyError) as refused:
        make_plan(encoders.build("bert"), Strategy(**strategy))
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_weights_between_projections_are_refused() -> None:
    model = encoders.build("bert")
    model.get_submodule("bert.encoder.layer.0.intermediate").add_module("norm", nn.LayerNorm(50))
    with pytest.raises(
        StrategyError, match=r"layer.0.intermediate.norm' have one element for each of the 50 features"
    ):
        make_plan(model, Strategy(axes={"tensor": 2}))
    model = encoders.build("vit")
    model.get_submodule("vit.layers.1.attention").add_module("norm", nn.LayerNorm(32))
    with pytest.raises(StrategyError, match=r"layers.1.attention.norm' lie between split projections"):
        make_plan(model, Strategy(axes={"tensor": 2}))
