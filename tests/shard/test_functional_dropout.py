"""Dropout that a module's own code calls as a function."""

from __future__ import annotations

from typing import Any

import encoders
import pytest
import torch
from test_shard_modules import RULES, Residual, plain_step
from torch import nn
from torch.nn import functional

from hyper_parallel.compat.local_tensor import simulated_ranks
from hyper_parallel.strategy import Strategy

_BIOGPT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.3, "activation_dropout": 0.1}
_BERT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.3}
_BART = {"dropout": 0.1, "attention_dropout": 0.3, "activation_dropout": 0.1}
CASES: list[Any] = [
    ("biogpt", _BIOGPT, {"shard": 2}, "none"),
    ("biogpt", _BIOGPT, {"shard": 2}, "layer"),
    ("bert", _BERT, {"shard": 2}, "none"),
    pytest.param("bart", _BART, {"replicate": 2}, "none", marks=pytest.mark.matrix),
    pytest.param("t5", {"dropout_rate": 0.1}, {"shard": 2}, "none", marks=pytest.mark.matrix),
    pytest.param("whisper", _BART, {"shard": 2}, "none", marks=pytest.mark.matrix),
    pytest.param(
        "distilbert",
        {"dropout": 0.1, "attention_dropout": 0.3},
        {"shard": 4},
        "none",
        marks=pytest.mark.matrix,
    ),
    pytest.param("vit", _BERT, {"shard": 2}, "none", marks=pytest.mark.matrix),
]


@pytest.mark.parametrize(("name", "rates", "axes", "recompute"), CASES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_what_a_model_drops_is_the_same_under_a_strategy(
    name: str, rates: dict[str, float], axes: dict[str, int], recompute: str, attention: str
) -> None:
    strategy = Strategy(axes=axes, memory={"recompute": recompute})
    report = encoders.report(name, strategy, attn_implementation=attention, **rates)
    assert report.ok, report.failures
    undropped = encoders.report(name, strategy, attn_implementation=attention)
    assert abs(undropped.loss[0] - report.loss[0]) > 1e-4


class Called(Residual):
    """Two dropouts of one forward pass, each by a number in the code; attention between them."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + functional.dropout(self.down1(torch.dropout(self.up1(x).relu(), 0.25, self.training)), 0.1)
        q = self.up2(self.norm(x)).unflatten(-1, (-1, 3)).transpose(1, 2)
        q = functional.scaled_dot_product_attention(q, q, q, dropout_p=0.3, is_causal=True)
        return self.head(functional.dropout(x + self.down2(q.transpose(1, 2).flatten(2)), 0.2))


class Layers(nn.Sequential):
    """A model of torch's own modules alone, as `nn.Sequential` is."""

    def __init__(self) -> None:
        super().__init__(
            nn.Embedding(13, 12), nn.Linear(12, 20), nn.Dropout(0.25), nn.Linear(20, 12), nn.Dropout(0.5)
        )


Layers.__module__ = nn.Sequential.__module__


@pytest.mark.parametrize("axes", [{"replicate": 2}, {"shard": 2}, {"tensor": 2}])
def test_a_model_whose_own_code_drops_nothing(axes: dict[str, int]) -> None:
    rules = {"1": "colwise", "3": "rowwise"} if "tensor" in axes else {}
    loss, expected = plain_step(Strategy(), "traceable", Layers)
    got_loss, got = on_ranks(Strategy(axes=axes, rules=rules), Layers)
    assert got_loss == pytest.approx(loss, rel=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"tensor": 3}, {"shard": 2, "tensor": 2}, {"replicate": 2}])
def test_numbers_in_the_code(axes: dict[str, int]) -> None:
    loss, expected = plain_step(Strategy(), "traceable", Called)
    got_loss, got = on_ranks(Strategy(axes=axes, rules=RULES if "tensor" in axes else {}), Called)
    assert got_loss == pytest.approx(loss, rel=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-5, msg=name)


def on_ranks(strategy: Strategy, made: type[nn.Module]) -> tuple[float, dict[str, torch.Tensor]]:
    with simulated_ranks(strategy.axes.world):
        return plain_step(strategy, "traceable", made)
