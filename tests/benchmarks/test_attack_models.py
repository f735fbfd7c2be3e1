"""The attack on every family: what it counts and what it writes."""

from __future__ import annotations

import attack_models
import pytest


def test_every_causal_model_of_transformers_is_attacked_or_is_made_of_several() -> None:
    names = attack_models.causal_families()
    assert {"llama", "gpt_neox", "codegen", "gemma3n_text", "mpt", "dbrx"} <= set(names)
    assert not {"gemma3", "qwen3_5", "musicgen"} & set(names)
    assert len(names) > 150


def test_a_family_is_run_under_every_strategy_that_it_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = {name: attack_models.STRATEGIES[name] for name in ("tensor 2", "expert 2")}
    monkeypatch.setattr(attack_models, "STRATEGIES", sample)
    cells = attack_models.attacked("llama")["cells"]
    assert {name: cell["outcome"] for name, cell in cells.items()} == {"tensor 2": "right"}
    assert cells["tensor 2"]["error"] < 1e-5


def test_heads_that_do_not_divide_are_told_from_other_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = {"tensor 3": {"axes": {"tensor": 3}}, "no such rule": {"axes": {"tensor": 2}, "rules": {"*": "up"}}}
    monkeypatch.setattr(attack_models, "STRATEGIES", odd)
    cells = attack_models.attacked("llama")["cells"]
    assert [cell["outcome"] for cell in cells.values()] == ["arithmetic", "refused"]


def test_what_is_wrong_and_what_crashes_is_said() -> None:
    def cells(**outcomes: str) -> dict[str, object]:
        return {"cells": {name: {"outcome": o, "detail": "why"} for name, o in outcomes.items()}}

    found = {
        "a": cells(**{"shard 2": "right", "tensor 2": "WRONG", "ring 2": "arithmetic"}),
        "b": cells(**{"shard 2": "right", "tensor 2": "traceback"}),
        "c": {"no_reference": "ImportError: no kernel", "cells": {}},
    }
    counts = attack_models.counted(found)
    assert (counts["cells"], counts["right"], counts["WRONG"], counts["right_share"]) == (5, 2, 1, 0.5)
    shown = "\n".join(attack_models.page({"transformers": "5", "of": 9, "counts": counts, "families": found}))
    assert "| a | ✓ | **wrong** | · | · | ÷ |" in shown
    assert "| b | ✓ | **crash** |" in shown
    assert "c (ImportError" in shown
