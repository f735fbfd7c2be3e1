"""The losses beside those that TRL's trainers gave on the same batches (benchmarks/verify_rl_losses.py wrote them)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.rl_loss_cases import FUNCTIONS

RIGHT = 1e-6
"""Absolute, of losses, advantages and each entry of a gradient: a few roundings of float32."""

VERSIONS = json.loads((Path(__file__).parent / "trl_reference.json").read_text())
CASES = [(version, case) for version, kept in sorted(VERSIONS.items()) for case in kept["cases"]]


def _tensor(value: Any) -> Tensor:
    """None, which JSON has for NaN, is NaN."""
    if isinstance(value, list):
        return torch.stack([_tensor(row) for row in value])
    return torch.tensor(float("nan") if value is None else value)


def _batch(version: str, place: int) -> dict[str, Tensor]:
    return {name: _tensor(value) for name, value in VERSIONS[version]["batches"][place].items()}


@pytest.mark.parametrize(
    ("version", "case"), CASES, ids=[f"{version}: {case['name']}" for version, case in CASES]
)
def test_equals_trl(version: str, case: dict[str, Any]) -> None:
    ours = FUNCTIONS[case["function"]](_batch(version, case["batch"]), case["settings"])
    assert ours.keys() == case["trl"].keys()
    for name, expected in case["trl"].items():
        torch.testing.assert_close(
            ours[name], _tensor(expected), rtol=0, atol=RIGHT, msg=f"{name}: {{}}".format
        )


def test_the_file_covers_what_is_compared() -> None:
    functions = {case["function"] for _, case in CASES}
    assert functions == set(FUNCTIONS)
    normalizations = {
        (case["settings"].get("normalization"), case["settings"].get("kl", 0) > 0) for _, case in CASES
    }
    assert normalizations >= {
        (name, kl) for name in ("grpo", "bnpo", "dr_grpo", "dapo") for kl in (False, True)
    }


@pytest.mark.parametrize(
    ("version", "case"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_gradient_of_trl_is_no_row_of_zeros(version: str, case: dict[str, Any]) -> None:
    """A batch on which nothing has a gradient would compare nothing."""
    for name, value in case["trl"].items():
        if name.endswith("gradient"):
            assert _tensor(value).abs().max() > 1e-4, name
