"""Presets and cluster files: every number has a source, and files are read back as what was written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hyper_parallel.cluster import Cluster, Device, Link
from hyper_parallel.cluster.files import text
from hyper_parallel.cluster.presets import names, peak_flops
from hyper_parallel.errors import ConfigError
from hyper_parallel.workload import Work

SHORT = (
    "node: 8\n"
    "device: {name: mine, matrix: {float32: 1e12}, vector: {float32: 1e11},\n"
    "         memory: {name: device, bytes: 1e9, read: 1e11, write: 1e11}}\n"
    "links: {node: {level: node, bandwidth: 1e10, latency: 1e-6}}\n"
)


def leaves(tree: Any, path: str = "") -> Iterator[str]:
    if not isinstance(tree, dict):
        yield path
        return
    for key, value in tree.items():
        yield from leaves(value, f"{path}.{key}" if path else key)


@pytest.mark.parametrize("name", names())
def test_a_preset_is_dumped_and_loaded_byte_by_byte(name: str, tmp_path: Path) -> None:
    cluster = Cluster.preset(name)
    cluster.dump(tmp_path / "one.yaml")
    again = Cluster.load(tmp_path / "one.yaml")
    assert again == cluster
    again.dump(tmp_path / "two.yaml")
    assert (tmp_path / "one.yaml").read_bytes() == (tmp_path / "two.yaml").read_bytes()


@pytest.mark.parametrize("name", names())
def test_every_number_has_a_source_or_says_how_it_was_estimated(name: str) -> None:
    tree = yaml.safe_load(text(Cluster.preset(name)))
    why = {**tree.pop("sources"), **tree.pop("estimates")}
    words = {"version", "name", "source", "device.name"}
    for path in leaves(tree):
        if path in words or path.endswith((".name", ".level")):
            continue
        # A memory that has one bandwidth writes as fast as it reads, for the same reason.
        assert path in why or path.replace(".write", ".read") in why, path
    assert all(reason for reason in why.values())


@pytest.mark.parametrize("name", names())
def test_a_preset_prices_a_step(name: str) -> None:
    cluster = Cluster.preset(name)
    assert cluster.device is not None
    work = Work.of_matmul(4096, 4096, 4096, dtype="bfloat16")
    ideal = work.flops / cluster.device.peak("bfloat16")
    assert ideal < cluster.device.seconds(work) < 4 * ideal
    ranks = 2 * (cluster.supernode or cluster.node or 1)
    assert {leg.level for leg in cluster.legs("all_reduce", 1e6, ranks)} == set(cluster.levels)
    assert cluster.copy_seconds("device", "host", 1e9) > 0


def test_names_with_a_number_of_devices_and_names_of_others() -> None:
    assert Cluster.named("h100x2048").ranks == 2048
    assert Cluster.named("H100").ranks is None
    assert Cluster.named("910cx768").name == "910cx768"
    assert Cluster.named("a3").supernode == 768
    with pytest.raises(ConfigError, match="did you mean 'h200'"):
        Cluster.named("h2000x8")
    with pytest.raises(ConfigError, match="at least one device"):
        Cluster.named("h100x0")


def test_a_file_is_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    good = text(Cluster.preset("h100"))
    path.write_text(good.replace("  latency: 3.4e-06", "  latncy: 3.4e-06"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"links.node.latncy: unknown key; did you mean 'latency'"):
        Cluster.load(path)
    path.write_text(good.replace("bandwidth: 4.5e+11", "bandwidth: -1"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"mine.yaml: links.node.bandwidth: .*greater than 0 \(got -1\)"):
        Cluster.load(path)
    path.write_text(good.replace("- [100000.0, 0.3]", "- [1.0e+08, 0.3]"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"device.efficiency.memory.0: .*its sizes ascend"):
        Cluster.load(path)
    path.write_text("version: 2\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="version 2 is not known"):
        Cluster.load(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        Cluster.load(tmp_path / "none.yaml")


def test_a_file_by_hand_may_be_short(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SHORT, encoding="utf-8")
    cluster = Cluster.load(path)
    assert isinstance(cluster.device, Device)
    assert cluster.links == {"node": Link("node", 1e10, 1e-6)}


def test_a_file_has_its_number_of_devices(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for key in ("devices", "ranks"):
        path.write_text(f"{SHORT}{key}: 16\n", encoding="utf-8")
        assert Cluster.named(str(path)).ranks == 16
    assert "devices: 16\n" in text(Cluster.load(path))
    assert "ranks" not in text(Cluster.load(path))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("devices: 0", r"mine.yaml: devices: .*greater than or equal to 1 \(got 0\)"),
        ("devices: -4", r"mine.yaml: devices: .*greater than or equal to 1 \(got -4\)"),
        ("devices: 1.5", r"mine.yaml: devices: .*valid integer.* \(got 1.5\)"),
        ("devices: true", r"mine.yaml: devices: .*valid integer.* \(got True\)"),
        ("devices: '16'", r"mine.yaml: devices: .*valid integer.* \(got 16\)"),
        ("devices: 16\nranks: 16", r"mine.yaml: devices and ranks are the same number; keep devices"),
        ("devcies: 16", r"mine.yaml: devcies: unknown key; did you mean 'devices'"),
    ],
)
def test_a_number_of_devices_is_checked(line: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"{SHORT}{line}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=problem):
        Cluster.load(path)


def test_mfu_and_presets_read_one_table() -> None:
    for name in names():
        cluster = Cluster.preset(name)
        assert cluster.device is not None
        for dtype in cluster.device.matrix:
            found = peak_flops(cluster.device.name, dtype)
            public = f"device.matrix.{dtype}" in cluster.sources
            if name in ("cloudmatrix384", "atlas950"):
                assert found is None  # no maker's figure
            else:
                assert found == (cluster.device.matrix[dtype] if public else None)


def test_a_preset_whose_name_ends_like_a_number_of_devices() -> None:
    assert Cluster.named("cloudmatrix384").ranks is None
    assert Cluster.named("cloudmatrix384x768").ranks == 768
