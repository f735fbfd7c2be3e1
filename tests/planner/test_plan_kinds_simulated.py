"""The closed forms of hybrids and adapters against the simulation of the captured step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kinds import beside

WITHIN = 0.15
"""Simulated and estimated steps may be so far apart: the estimate's constants were fitted on other kernels."""


@pytest.mark.parametrize(
    ("model", "adapter"),
    [
        ("llama", None),
        ("llama", {"rank": 16}),
        ("llama", {"rank": 64, "targets": ["q_proj", "v_proj"]}),
        ("lfm2", None),
        ("bamba", None),
    ],
)
def test_simulated_and_estimated_steps_agree(tmp_path: Path, model: str, adapter: Any) -> None:
    found = beside(model, str(tmp_path), adapter)
    simulated, estimated = found["step"]
    assert estimated == pytest.approx(simulated, rel=WITHIN), found


def test_adapters_shorten_both_alike(tmp_path: Path) -> None:
    whole, frozen = (
        beside("llama", str(tmp_path))["step"],
        beside("llama", str(tmp_path), {"rank": 16})["step"],
    )
    simulated, estimated = (frozen[i] / whole[i] for i in (0, 1))
    assert simulated < 0.8
    assert estimated == pytest.approx(simulated, abs=0.1)
