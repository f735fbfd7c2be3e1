"""Real workers come to one strategy, and it is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from auto_cases import launched, machine, run_file

from harness.commands import noted
from hyper_parallel.errors import ConfigError
from hyper_parallel.train import Trainer
from hyper_parallel.verify import verify_file


def test_all_ranks_take_what_rank_0_chose(tmp_path: Path) -> None:
    machine(2).dump(tmp_path / "cluster.yaml")
    # With one head and the copies fixed, there is one strategy and nothing to simulate.
    open_ = {
        "axes": {"replicate": "auto", "tensor": "auto"},
        "memory": {"recompute": "none"},
        "cluster": str(tmp_path / "cluster.yaml"),
    }
    config = run_file(tmp_path, open_, heads=1, train={"batch": 2}, launch={"workers": 2})
    assert launched(config, "settle") == 0
    first, second = (noted(tmp_path, rank) for rank in range(2))
    assert first["axes"] == second["axes"] and first["axes"]["replicate"] == 2 and first["micro"] == 1
    text = (tmp_path / "run" / "strategy.yaml").read_text()
    assert "replicate: 2" in text and text.startswith("# chosen for 2 workers")


def test_all_ranks_end_with_what_rank_0_found_wrong(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    machine(2, gib=0.1).dump(tmp_path / "cluster.yaml")
    strategy = {"axes": "auto", "cluster": str(tmp_path / "cluster.yaml")}
    assert launched(run_file(tmp_path, strategy, launch={"workers": 2}), "settle") == 2
    assert capfd.readouterr().err.count("fits no strategy of 2 workers") == 1


def test_who_needs_a_strategy_says_so(tmp_path: Path) -> None:
    for refused in (lambda c: Trainer(c).run(), verify_file):
        with pytest.raises(ConfigError, match=r"leaves .* to the planner, which chooses when"):
            refused(run_file(tmp_path))
