"""What commands show fits into a terminal of 80 columns, and numbers stay whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.calibrate import render as calibrated
from hyper_parallel.cluster import Cluster, CollectiveTable, CopyTable, Shared
from hyper_parallel.estimate.inspect_report import CollectiveRow, Inspection, ModuleRow
from hyper_parallel.launch import doctor
from hyper_parallel.report import table
from hyper_parallel.report.sheets import Sheet
from hyper_parallel.report.table import sheet_text
from hyper_parallel.trace import Timeline
from hyper_parallel.verify.report import Difference, Report

WIDTH = 80


def _check(text: str, *numbers: str) -> None:
    assert max(map(len, text.splitlines())) <= WIDTH, text
    assert "…" not in text
    for number in numbers:
        assert number in text, (number, text)


def _verified() -> str:
    name = "model.layers.10.mlp.experts.gate_up_projection.weight"
    worst = [Difference(name, "[4096/tensor_x/shard, 8192/tensor_y]", 7.9e-07, 8.8e-08)] * 3
    return Report("shard 2", "gloo", "float32", (8.3306284, 8.3306274), (5.07, 5.07), worst).table(
        width=WIDTH
    )


def _inspected() -> str:
    row = ModuleRow(
        "model.layers.*.post_attention_layernorm", 126, "weight", "[16384/tensor_x/shard]",
        1023 * 2**20, 1022 * 2**20, 1021 * 2**20, 1020 * 2**20,
    )  # fmt: skip
    call = CollectiveRow("shard*tensor_x", "node + network", "reduce_scatter", 12345, 2**40)
    return Inspection(
        world=8192, axes={"shard": 64, "context": 16, "tensor_x": 8}, rank=0, parameters=405 * 10**9, rows=[row] * 2,
        gathered=0, transient=0, peak=1019 * 2**20, collectives=[call], micro_batches=1, micro_batch=1, sequence=8192,
        kinds=[126], whole=False, balanced=False, notes=[],
    ).table(WIDTH)  # fmt: skip


def _calibrated() -> str:
    device = Cluster.named("h100").device
    assert device is not None
    found = [
        CollectiveTable(
            "reduce_scatter", "node", 8, ((1024.0, 0.9e-3), (2.0**26, 0.888)), 1e-4, 1e9, 0.1, 0.2
        )
    ]
    copies = (CopyTable("device", "host", ((1024.0, 1e-6), (2.0**26, 1e-2)), 0.5),)
    shared = {n: Shared(device, tuple(found), 2.0 if n > 2 else None) for n in (2, 4, 8)}
    return calibrated(Cluster(device=device, links={}, source="", copies=copies, shared=shared), WIDTH)


def test_verify() -> None:
    _check(_verified(), "7.9e-07", "8.8e-08", "8.3306284")


def test_inspect() -> None:
    _check(_inspected(), "1023.0 MiB", "1022.0 MiB", "1021.0 MiB", "1020.0 MiB", "1019.0 MiB", "12345")


def test_calibrate() -> None:
    _check(_calibrated(), "900 µs", "888.00 ms", "1.0 GB/s", "each of 8")


def test_doctor() -> None:
    names = {"cpu": "AMD EPYC " * 20}
    report = {
        name: {} for name in ("versions", "integrations", "machine", "network", "launcher", "environment")
    }
    told = {**report, "machine": names, "devices": [], "warnings": [{"what": "x " * 60, "mend": "mend it"}]}
    _check(doctor.render(told, WIDTH), "warning: x")


def test_simulate(timeline: Timeline) -> None:
    for shown in (timeline, replace(timeline, predicted=False)):
        _check(table(shown, WIDTH), "of step")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_end_behind_dots_and_underscores(width: int) -> None:
    rows = ((f"model.layers.*.{'long_name.' * 6}weight", "12.3 GiB"),)
    text = sheet_text(Sheet("", ("module", "bytes"), rows), width)
    assert max(map(len, text.splitlines())) <= width
    cells = [line.split("│")[1].strip() for line in text.splitlines() if "│" in line]
    assert "".join(cells) == rows[0][0]
    assert all(cell.endswith((".", "_")) for cell in cells[:-1])
