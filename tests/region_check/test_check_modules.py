"""Modules of a user's own that mix features between split projections are refused; those that do not are accepted."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from harness.equivalence import build_model
from harness.families import FAMILIES
from harness.modules import BROKEN, RIGHT, RULES, WIDTH, Model
from harness.small_models import small_fields
from hyper_parallel.errors import StrategyError
from hyper_parallel.graph.likeness import described
from hyper_parallel.shard.parallelize import on_simulated_ranks as spread
from hyper_parallel.shard.parallelize import refusal_of_tokens
from hyper_parallel.shard.plan import make_plan
from hyper_parallel.shard.region_check import check, diagnosis, outcome, reduced_model
from hyper_parallel.shard.region_check.outcome import SeenCall
from hyper_parallel.shard.region_check.reduced_model import Reduced
from hyper_parallel.strategy import Strategy

CALL = SeenCall.of((torch.zeros(2, 6, WIDTH),), {})
TENSOR = Strategy(axes={"tensor": 2}, rules=RULES)
ADVISED = ("softmax", "shared scalar", "packed halves")


def _found(between: str, modules: dict[str, object] = BROKEN) -> Reduced | str | None:
    model = Model(modules[between])  # type: ignore[arg-type]
    return check._on_a_copy(model, TENSOR, make_plan(model, TENSOR), [CALL], spread)


def test_layers_that_cannot_run_twice_are_refused() -> None:
    # XLM always has a cache, which a layer adds its keys to.
    strategy = Strategy(axes={"replicate": 2}, memory={"recompute": "layer"})
    refusal = refusal_of_tokens(build_model(small_fields("xlm")), strategy, 100)
    assert refusal is not None and "right, and checked, with memory.recompute: none" in refusal
    assert refusal_of_tokens(build_model(small_fields("llama")), strategy, 100) is None


def test_a_calls_rows_are_those_of_its_first_tensor() -> None:
    handle = spread(nn.Linear(2, 2), Strategy())
    for arguments, rows in (
        ((torch.zeros(3, 2),), 3),
        ((torch.tensor(1.0), torch.zeros(3)), 1),
        (("text",), 1),
    ):
        assert SeenCall.of(arguments, {}).rows(handle).tolist() == list(range(rows))


def test_only_the_layers_that_are_copied_count_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a module that is no Transformers model; the layers that are left out have no memory."""
    model = nn.Sequential(nn.ModuleList(nn.Linear(8, 8) for _ in range(4)))
    layer = sum(one.numel() for one in model[0][0].parameters())
    monkeypatch.setattr(reduced_model, "LARGEST", layer)
    made = reduced_model._from_module(model, 1)
    assert len(made.get_submodule("0")) == 1 and len(model[0]) == 4
    monkeypatch.setattr(reduced_model, "LARGEST", layer - 1)
    with pytest.raises(StrategyError, match=f"a copy of {layer} parameters is too large"):
        reduced_model._from_module(model, 1)


@pytest.mark.parametrize("between", BROKEN)
def test_what_mixes_features_is_refused(between: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Advice is another test's.
    monkeypatch.setattr(diagnosis, "rules_that_pass", lambda *_: None)
    monkeypatch.setattr(diagnosis, "without_axes", lambda *_: [])
    found = _found(between)
    assert isinstance(found, str), f"accepted: {found}"
    assert "strategy.check" in found


@pytest.mark.parametrize("between", RIGHT)
def test_what_sees_one_feature_at_a_time_is_accepted(between: str) -> None:
    assert isinstance(_found(between, RIGHT), Reduced)  # type: ignore[arg-type]


@pytest.mark.parametrize("between", ADVISED)
def test_advice_is_verified_and_right(between: str) -> None:
    found = _found(between)
    assert isinstance(found, str)
    rules = {"layers.*.up": "replicate", "layers.*.gate": "replicate", "layers.*.down": "replicate"}
    assert "right, and checked, with strategy.rules: {layers.*.up: replicate" in found
    model = Model(BROKEN[between])
    advised = Strategy(axes={"tensor": 2}, rules={**RULES, **rules}, check=False)
    assert outcome.compared(model, advised, CALL, spread) is None


def test_a_whole_model_with_one_wrong_region_keeps_the_others_split() -> None:
    model = nn.Sequential(Model(BROKEN["softmax"]), Model(RIGHT["relu"]))
    rules = {f"{at}.{pattern}": rule for at in (0, 1) for pattern, rule in RULES.items()}
    strategy = Strategy(axes={"tensor": 2}, rules=rules)
    found = check._on_a_copy(model, strategy, make_plan(model, strategy), [CALL], spread)
    assert isinstance(found, str)
    assert "0.layers" in found.partition("strategy.rules")[2]
    assert "1.layers" not in found.partition("strategy.rules")[2]


def test_randomness_is_named_by_module_and_operator() -> None:
    drawn = diagnosis.unrepeatable(Model(BROKEN["noise"]), CALL, spread)
    assert drawn == "'layers.0' (randn_like), 'layers.1' (randn_like)"
    assert "outside of PyTorch" in str(
        diagnosis.unrepeatable(Model(BROKEN["random of Python"]), CALL, spread)
    )
    assert diagnosis.unrepeatable(Model(RIGHT["relu"]), CALL, spread) is None


def test_draws_without_effect_are_no_reason() -> None:
    class Drawing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.rand(())  # as layer drop does whose rate is 0
            return super().forward(x)

    assert diagnosis.unrepeatable(Drawing(WIDTH, 3), CALL, spread) is None


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
def test_what_remembers_a_check_is_the_same_in_every_process(family: str) -> None:
    """No object's identity, nor a hash of Python's: what passed would never be found again."""
    for key, value in described(build_model(FAMILIES[family])).items():
        assert not re.search(r"(?<![.\d])\d{12,}", value), key
