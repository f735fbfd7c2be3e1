"""docs/features.md is the table of tools/features.py, and a cell of each kind is what a run says."""

from __future__ import annotations

from pathlib import Path

import features
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "features.md"


def _cells() -> dict[tuple[str, str], str]:
    """Feature and kind of run to the reason why not; empty where it works."""
    table = features.written(PAGE.read_text())
    return {(name, way): why for name, row in table.items() for way, why in row.items()}


def test_every_feature_and_kind_of_run_has_a_cell(tmp_path: Path) -> None:
    assert list(_cells()) == [(name, way) for name in features.FEATURES for way in features.ways(tmp_path)]


@pytest.mark.parametrize(
    ("name", "way"), [("evaluation", "pipeline"), ("compiled", "pipeline"), ("profile", "RL actor")]
)
def test_a_cell_is_what_a_run_says(name: str, way: str, tmp_path: Path) -> None:
    file = features.ways(tmp_path)[way]
    assert features.cell(way, file, name, tmp_path) == _cells()[name, way]
