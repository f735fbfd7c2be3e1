"""docs/features.md is the table of tools/features.py, and a cell of each kind is what a run says."""

from __future__ import annotations

import re
from pathlib import Path

import features
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "features.md"


def _cells() -> dict[tuple[str, str], str]:
    """Feature and kind of run to the reason why not; empty where it works."""
    text = PAGE.read_text()
    reasons = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return {
        (row[0], way): "" if shown == "yes" else reasons[shown.removeprefix("no (").removesuffix(")")]
        for row in rows
        for way, shown in zip(head[1:], row[1:], strict=True)
    }


def test_every_feature_and_kind_of_run_has_a_cell(tmp_path: Path) -> None:
    assert list(_cells()) == [(name, way) for name in features.FEATURES for way in features.ways(tmp_path)]


@pytest.mark.parametrize(
    ("name", "way"), [("evaluation", "pipeline"), ("compiled", "pipeline"), ("profile", "RL actor")]
)
def test_a_cell_is_what_a_run_says(name: str, way: str, tmp_path: Path) -> None:
    file = features.ways(tmp_path)[way]
    assert features.cell(way, file, name, tmp_path) == _cells()[name, way]
