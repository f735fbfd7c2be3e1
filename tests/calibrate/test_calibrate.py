"""The command, end to end on a few tiny sizes, with real workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from hyper_parallel.calibrate import Settings, calibrate, render
from hyper_parallel.cli.calibrate import calibrate as command
from hyper_parallel.cluster import Cluster, Efficiency, ShapeTable, Shared
from hyper_parallel.errors import ConfigError
from hyper_parallel.workload import Work


@pytest.fixture(scope="module")
def measured(half_attention: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Cluster, list[str]]:
    said: list[str] = []
    folder = tmp_path_factory.mktemp("flash")
    cluster = calibrate(Settings(workers=2, level="tiny", device="cpu", folder=folder), said.append)
    assert not list(folder.iterdir())
    return cluster, said


def test_the_file_is_read_back(measured: tuple[Cluster, list[str]], tmp_path: Path) -> None:
    cluster, _ = measured
    cluster.dump(tmp_path / "here.yaml")
    assert Cluster.load(tmp_path / "here.yaml") == cluster


def test_what_was_measured_is_predicted(measured: tuple[Cluster, list[str]]) -> None:
    device = measured[0].device
    assert device is not None
    assert {(table.dtype, table.layout) for table in device.efficiency.matmul} == {
        (dtype, layout) for dtype in ("float32", "bfloat16") for layout in ("nn", "nt", "tn")
    }
    for table in device.efficiency.matmul:
        batch, m, n, k, share = table.points[0]
        work = Work.of_matmul(
            int(m), int(n), int(k), batch=int(batch), dtype=table.dtype, layout=table.layout
        )
        arithmetic = work.flops / (device.matrix[table.dtype] * share)
        assert device.compute_seconds(work) == pytest.approx(arithmetic, rel=1e-6)
    assert device.seconds(Work("elementwise", read=2**20, written=2**20, op="aten.exp")) > 0
    assert {table.op for table in device.efficiency.memory} >= {"aten.add", "aten.clone", "aten._softmax"}


def test_workers_share_the_cores_and_talk(measured: tuple[Cluster, list[str]]) -> None:
    cluster, said = measured
    two = cluster.for_workers(2)
    assert two.device is not None
    assert two.device.memory.ranks == 2
    assert {table.kind for table in two.collectives} == {
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast",
    }  # fmt: skip
    assert two.collective_seconds("all_reduce", 2**16, 2) > 0
    assert said[0].startswith("1 worker:")
    assert said[-1] == "2 workers: collectives"


def test_copies_between_memories_are_known(measured: tuple[Cluster, list[str]]) -> None:
    cluster = measured[0]
    for source, target in (("device", "host"), ("host", "device"), ("host", "flash"), ("flash", "host")):
        assert cluster.copy_seconds(source, target, 2**20) > 0
    assert cluster.tier("flash").bytes > cluster.tier("host").bytes / 1000


def test_the_tables_show_each_with_its_spread(measured: tuple[Cluster, list[str]]) -> None:
    shown = render(measured[0])
    for words in (
        "alone",
        "each of 2",
        "matmul 64³ bfloat16",
        "±",
        "all_reduce",
        "host → flash",
        "fit off by",
    ):
        assert words in shown, words


def test_what_was_not_measured_is_called_an_estimate(measured: tuple[Cluster, list[str]]) -> None:
    device = measured[0].device
    assert device is not None
    shared = {2: Shared(device), 4: Shared(device.slowed(2), slower=2.0)}
    shown = " ".join(render(Cluster(device=device, shared=shared)).split())
    assert shown.count("(estimate)") == 1


def test_a_busy_machine_is_told(measured: tuple[Cluster, list[str]]) -> None:
    for spread, told in ((0.01, False), (0.9, True)):
        tables = (ShapeTable("float32", "nn", spread=spread),)
        device = replace(measured[0].device, efficiency=Efficiency(matmul=tables))  # type: ignore[type-var]
        shown = render(Cluster(device=device))
        assert ("something else computes here" in " ".join(shown.split())) is told


def test_the_command_refuses_a_folder_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["--out", str(tmp_path / "none" / "x.yaml")])
    assert isinstance(result.exception, ConfigError)
    assert "does not exist" in str(result.exception)


def test_fewer_than_one_worker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 1; got 0"):
        calibrate(Settings(workers=0, folder=tmp_path), lambda said: None)
