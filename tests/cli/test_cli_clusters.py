"""`hyper-parallel clusters` lists presets, prints one with the sources of its numbers, and writes it as a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hyper_parallel.cli.main import main
from hyper_parallel.cluster import Cluster
from hyper_parallel.cluster.presets import names


def run(*arguments: str) -> int:
    """The exit code of the command."""
    try:
        main(["clusters", *arguments])
    except SystemExit as ended:
        return int(str(ended.code))
    return 0


def test_the_list_has_every_preset_within_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns in ("80", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        assert run() == 0
        shown = capsys.readouterr().out.splitlines()
        assert max(map(len, shown)) <= int(columns)
        rows = {line.split("│")[1].strip(): line for line in shown if line.startswith("│")}
        assert list(rows) == names()
    assert "4 · 72" in rows["gb200-nvl72"]
    [cells] = [[cell.strip() for cell in rows["rtx4090"].strip("│").split("│")]]
    assert cells[:8] == ["rtx4090", "eight RTX 4090", "8", "24", "165", "1,008", "31.5", "1.56"]
    cluster = Cluster.preset("rtx4090")
    assert cells[-1] == f"{len(cluster.estimates)} of {len(cluster.estimates) + len(cluster.sources)}"


def test_json_has_the_numbers_in_bytes_and_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == names()
    assert rows["h100"]["flops"] == 989e12
    assert rows["h100"]["links"] == {"node": 450e9, "network": 50e9, "host": 63e9}
    assert run("h100", "--json") == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["device"]["memory"]["bytes"] == 80e9
    assert tree["sources"]["links.node.bandwidth"].startswith("NVIDIA H100 datasheet")


def test_one_machine_has_the_source_of_every_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert run("mi300x") == 0
    shown = capsys.readouterr().out
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")] for line in shown.splitlines() if line[0] == "│"
    ]
    # A number of a longer path, or source, goes on in a line without a value.
    whole = {number: (value, source) for number, source, value in rows if value}
    assert whole["device.memory.read"][0] == "5,300 GB/s"
    assert whole["device.memory.write"] == whole["device.memory.read"]
    assert whole["device.matrix.bfloat16"] == ("1307.4 TFLOP/s", "AMD Instinct MI300X datasheet (2023)")
    assert whole["links.node.latency"][0] == "3.4 µs"
    assert whole["host.bytes"] == ("2,000 GB", "estimate: a usual configuration")
    assert all(source for _, source in whole.values())


def test_a_file_to_start_from_is_written_and_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.yaml"
    assert run("rtx4090x8", "--out", str(out)) == 0
    assert f"written: {out}" in capsys.readouterr().err
    assert Cluster.load(out) == Cluster.named("rtx4090x8")
    assert "devices: 8\n" in out.read_text()
    assert run("rtx4090x8", "--out", str(out)) == 0, "the same content again"
    capsys.readouterr()
    assert run("rtx4090x16", "--out", str(out)) == 2
    assert "exists with other content" in capsys.readouterr().err
    assert Cluster.load(out).ranks == 8
    # A file of one's own is shown too.
    assert run(str(out)) == 0
    assert "165.2 TFLOP/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("rtx4080",), "there is no cluster 'rtx4080'; did you mean 'rtx4090'?"),
        (("none.yaml",), "none.yaml: the cluster file cannot be read: No such file or directory"),
        (("--out", "mine.yaml"), "--out writes one machine; name it, as in rtx4090x8"),
        (("h100", "--out", "none/mine.yaml"), "none does not exist; create it first"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: tuple[str, ...], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
