"""Tokens under axes and memory tiers beside Transformers' `generate`, and the judge of such cells."""

from __future__ import annotations

import pytest

from harness.generation_cells import Reference, run_cell


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference("llama", 12)


@pytest.mark.parametrize(("axes", "memory"), [({}, None), ({"tensor": 2}, "pool")])
def test_a_cell_is_right(reference: Reference, axes: dict[str, int], memory: str | None) -> None:
    found = run_cell(reference, axes, memory)
    assert (found.outcome, found.detail) == ("right", "")
    assert found.tokens == 48
    assert bool(found.moved) == (memory is not None)


def test_a_refusal_has_its_reason(reference: Reference) -> None:
    found = run_cell(reference, {"pipeline": 2}, "host")
    assert found.outcome == "refused"
    assert "axes.pipeline" in found.detail


def test_one_other_token_and_a_missing_one_are_wrong(reference: Reference) -> None:
    other = [list(tokens) for tokens in reference.expected]
    other[2][5] = (other[2][5] + 1) % 131
    found = reference.judge(other)
    assert found.outcome == "wrong"
    assert "prompt of 33 tokens, token 5" in found.detail
    assert reference.judge([tokens[:-1] for tokens in reference.expected]).outcome == "wrong"
