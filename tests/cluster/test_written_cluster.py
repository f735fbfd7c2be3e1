"""The cluster file of docs/cluster.md: ten lines that `plan` and `simulate` take."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from hyper_parallel.cli.main import command
from hyper_parallel.cluster import Cluster

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
TEN_LINES, ALL_KEYS = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
SMALL = ("model.config.hidden_size=64", "model.config.num_hidden_layers=2", "data.sequence=64")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text(TEN_LINES, encoding="utf-8")
    return file


def test_ten_lines_are_a_cluster(path: Path) -> None:
    assert TEN_LINES.count("\n") <= 10
    cluster = Cluster.load(path)
    assert (cluster.node, cluster.ranks, cluster.peer_to_peer) == (4, 8, False)
    preset = Cluster.preset("rtx4090")
    assert preset.device is not None
    assert cluster.device is not None
    assert cluster.device.peak("bfloat16") == preset.device.peak("bfloat16")
    assert cluster.link("node").reached == pytest.approx(preset.link("node").reached)


def test_the_planner_answers_for_it(path: Path) -> None:
    [line] = re.findall(r"^ +hyper-parallel (plan .*mine.yaml.*)$", GUIDE, re.MULTILINE)
    found = CliRunner().invoke(
        command, [*line.replace("mine.yaml", str(path)).split(), "--json", "--simulate", "0"]
    )
    assert found.exit_code == 0, found.output
    best = json.loads(found.stdout)["best"][0]
    assert best["fits"]
    assert 0 < best["step_time_s"] < 1000


def test_the_simulator_predicts_a_step_on_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    [line] = re.findall(r"^ +hyper-parallel (simulate .*mine.yaml.*)$", GUIDE, re.MULTILINE)
    words = line.replace("mine.yaml", str(path)).split()
    found = CliRunner().invoke(command, [*words, *SMALL, "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["ranks"] == 8


def test_the_file_with_all_keys_is_one(tmp_path: Path) -> None:
    (tmp_path / "all.yaml").write_text(ALL_KEYS, encoding="utf-8")
    cluster = Cluster.load(tmp_path / "all.yaml")
    assert cluster.levels == ("root", "node", "network")
    assert cluster.ranks == 64
