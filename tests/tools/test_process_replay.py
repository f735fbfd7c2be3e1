"""Process replay: the same tree has the same digests, and a change shows."""

from __future__ import annotations

import json
import sys
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.forked_command import run_script

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import replay

TOOL = Path(replay.__file__)


def test_digests_see_values_and_no_names() -> None:
    one, other = make_dataclass("Held", ["bytes_"]), make_dataclass("Buffer", ["size"])
    assert replay.digest(one(3)) == replay.digest(other(3)) != replay.digest(other(4))
    assert replay.digest({"b": 1, "a": 2}) == replay.digest({"a": 2, "b": 1})
    assert replay.digest(torch.zeros(2)) != replay.digest(torch.tensor([0.0, -0.0]))


def test_a_cell_is_recorded_the_same_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def recorded() -> dict[str, Any]:
        return dict(replay.of_cell("graph", "llama", "tensor 2"))

    before = recorded()
    assert before.keys() == {"graph/llama/tensor 2", "trace/llama/tensor 2"}
    assert recorded() == before
    monkeypatch.setattr("harness.equivalence.LENGTH", 16)
    monkeypatch.setattr("harness.equivalence.family_config.__defaults__", (None, 16))
    after = recorded()
    assert all(after[name] != before[name] for name in before)


def test_what_differs_is_listed(tmp_path: Path) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps({"plan/a": "1", "plan/b": "2"}))
    after.write_text(json.dumps({"plan/a": "1", "plan/b": "3"}))
    done = run_script(TOOL, "compare", str(before), str(after), folder=tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["plan/b: 2 before, 3 after", "1 equal, 1 differ"]
    assert run_script(TOOL, "compare", str(before), str(before), folder=tmp_path).returncode == 0
