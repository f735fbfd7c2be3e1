"""Families beside their owner: what counts as right, what a process that dies leaves, and what the page shows."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import owner
import owner_comparisons
import pytest
import torch
from owner_verdicts import NoReferenceError, difference, judged

from hyper_parallel.errors import StrategyError


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "right"), (1.001, "wrong")])
def test_a_loss_is_right_when_it_is_the_owners(
    factor: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = owner_comparisons.causal_lm_loss
    monkeypatch.setattr(owner_comparisons, "causal_lm_loss", lambda *a, **k: factor * ours(*a, **k))
    found = judged(lambda: owner_comparisons.loss("llama"))
    assert found["verdict"] == verdict, found


def test_a_gradient_that_is_missing_or_not_finite_is_a_difference() -> None:
    right = {"a": torch.ones(3), "b": torch.full((2,), 4.0)}
    assert difference(right, {name: x.clone() for name, x in right.items()}) == (0.0, "")
    assert difference(right, {"a": torch.ones(3)}) == (1.0, "b")
    assert difference(right, {**right, "a": torch.full((3,), torch.nan)}) == (float("inf"), "a")
    assert difference(right, {**right, "c": torch.zeros(5)})[0] == 0.0
    assert difference(right, {**right, "c": torch.ones(5)})[1] == "c"
    assert difference(right, {**right, "b": torch.ones(3)})[0] == float("inf")


def test_whatever_a_comparison_raises_is_a_verdict() -> None:
    def raises(error: Exception) -> Any:
        def comparison() -> Any:
            raise error

        return judged(comparison)

    refused = {"verdict": "refused", "detail": "no such axis", "seconds": 0.0}
    assert raises(StrategyError("no\nsuch axis")) == refused
    assert raises(NoReferenceError("none"))["verdict"] == "no reference"
    assert "KeyError: 'x'" in raises(KeyError("x"))["detail"]


def test_a_family_whose_process_dies_keeps_the_verdicts_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def comparisons(family: str) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "loss", {"verdict": "right", "error": 0.0}
        os._exit(3)

    monkeypatch.setattr(owner_comparisons, "comparisons", comparisons)
    found = owner.compared("llama")
    assert found["loss"]["verdict"] == "right"
    assert found["packing"] == {"verdict": "traceback", "detail": "the process ended with 3"}


def test_a_family_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def comparisons(family: str) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "loss", {"verdict": "right", "error": 0.0}
        owner.time.sleep(60)

    monkeypatch.setattr(owner_comparisons, "comparisons", comparisons)
    monkeypatch.setattr(owner, "LIMIT_S", 0.3)
    assert owner.compared("llama")["export"]["detail"] == "took more than 0.3 s"


def test_slices_together_are_every_family() -> None:
    families = [f"family {number}" for number in range(10)]
    slices = [owner.slice_of(families, f"{number}/4") for number in range(1, 5)]
    assert sorted(itertools.chain(*slices)) == sorted(families)
    assert max(map(len, slices)) - min(map(len, slices)) <= 1


def test_the_page_counts_and_gives_each_reason_once() -> None:
    right = {name: {"verdict": "right"} for name in owner.COMPARISONS}
    lost, again = (
        {**right, "packing": {"verdict": "refused", "detail": f"{name} is off by {error}"}}
        for name, error in (("LlamaForCausalLM", "0.1"), ("GPT2LMHeadModel", "2e-01"))
    )
    rows = {"a": right, "b": lost, "c": again, "d": {**right, "loss": {"verdict": "wrong", "detail": "off"}}}
    result = {"transformers": "5", "of": 9, "counts": owner.counted(rows), "families": rows}
    assert result["counts"]["packing"] == {"right": 2, "refused": 2}
    shown = list(owner.lines(result))
    assert shown[0].startswith("4 of the 9 families of Transformers 5")
    assert "- packing: b, c: the model is off by N" in shown
    assert "- loss: d: off" in shown
    assert "| d | **wrong** | ✓ | ✓ | ✓ | ✓ | ✓ |" in shown
