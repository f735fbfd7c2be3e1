"""What the table says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.traces import Ops, one_f_one_b, toy, trace
from hyper_parallel.report import table
from hyper_parallel.report.sheets import ROWS, Sheet, facts, sheets
from hyper_parallel.report.table import fitting, render, wrapped
from hyper_parallel.simulator import simulate
from hyper_parallel.trace import Bytes, Timeline


def _values(timeline: Timeline) -> dict[str, str]:
    return {fact.name: fact.value for fact in facts(timeline)}


def test_it_begins_with_predicted_or_measured(timeline: Timeline) -> None:
    text = table(timeline)
    assert text.startswith("predicted step of 64 ranks on h100x64 (NVIDIA H100 80GB HBM3); constants: ")
    measured = table(replace(timeline, predicted=False))
    assert measured.startswith("measured step")
    assert "predicted" not in measured
    assert max(len(line) for line in text.splitlines()) <= 120


def test_the_parts_of_a_step_add_up() -> None:
    timeline = simulate(one_f_one_b(4, 8, 1.0, 2.0), toy())
    balance = sheets(timeline)[0]
    assert [(row[0], row[1]) for row in balance.rows] == [
        ("computing", "24.0 s"), ("exposed communication", "0 s"), ("waiting: fill and drain", "9.00 s"),
        ("step", "33.0 s"),
    ]  # fmt: skip
    classes = next(sheet for sheet in sheets(timeline) if sheet.title == "rank classes")
    assert [row[1] for row in classes.rows] == ["0", "1", "2", "3"]


def test_figures_are_those_of_the_timeline(timeline: Timeline) -> None:
    values = _values(timeline)
    assert timeline.mfu is not None
    assert values["MFU"] == f"{100 * timeline.mfu:.1f}%"
    assert values["masked, by blocked time"] == f"{100 * timeline.masked.blocked:.1f}%"  # type: ignore[operator]
    phases = next(sheet for sheet in sheets(timeline) if sheet.title == "time by phase")
    assert [row[0] for row in phases.rows] == ["forward", "loss", "backward", "clip", "optimizer"]


def test_equal_layers_are_one_row(timeline: Timeline) -> None:
    modules = next(sheet for sheet in sheets(timeline) if sheet.title == "time by module")
    assert "model.layers.*.mlp" in [row[0] for row in modules.rows]
    alive = next(sheet for sheet in sheets(timeline) if sheet.title == "alive at the peak of device memory")
    gate = next(row for row in alive.rows if row[0] == "gate")
    assert gate[1:5] == ("model.layers.*.mlp", "forward", "activation", "4")


def test_many_modules_end_in_one_row() -> None:
    ops = Ops()
    for place in range(30):
        ops.kernel("k", 30 - place, module=f"m{place:02}_")
    modules = next(s for s in sheets(simulate(trace(ops), toy())) if s.title == "time by module")
    assert len(modules.rows) == ROWS
    assert modules.rows[0][0] == "m00_"
    assert modules.rows[-1][:2] == (f"{30 - ROWS + 1} others", f"{sum(range(1, 30 - ROWS + 2)):.0f} s")


def test_memory_that_does_not_fit_is_told() -> None:
    ops = Ops()
    ops.kernel("k", 1)
    ran = trace(ops, resident=[Bytes(1, 4 * 10**15, "parameter")])
    found = next(fact for fact in facts(simulate(ran, toy())) if fact.name == "peak of device memory")
    assert found.meaning.endswith("(400.0%): it does not fit")


def test_names_with_brackets_are_shown_as_they_are() -> None:
    ops = Ops()
    ops.kernel("k", 1, module="[bold]block[/bold]")
    assert "[bold]block[/bold]" in table(simulate(trace(ops), toy()))


WIDE = Sheet(
    "strategies",
    ("", "axes", "settings", "step (90%)", "MFU", "bubble"),
    (
        ("1", "replicate 2 · shard 2 · tensor_x 2", "micro 1, ZeRO-3, keep all", "4.15 s (3.62–5.60)", "41.0%", "0.4%"),
        ("2", "shard 64", "micro 1", "4.25 s (3.62–5.60)", "40.0%", "0.0%"),
    ),
    left=3,
    drop=("bubble", "MFU"),
)  # fmt: skip


@pytest.mark.parametrize("width", [60, 70, 80, 100, 160])
def test_a_table_keeps_to_the_width_and_says_what_it_leaves_out(width: int) -> None:
    text = render("", [], [WIDE], "estimated", width)
    assert max(len(line) for line in text.splitlines()) <= width
    shown, left_out = fitting(WIDE, width)
    assert ("left out at this width" in text) == bool(left_out)
    assert left_out == [name for name in WIDE.drop if name not in shown.columns]
    assert all(name in text for name in shown.columns)
    assert "4.15 s (3.62–5.60)" in text or width < 70, "a number is never folded where there is room"


def test_the_least_important_columns_go_first() -> None:
    found = [fitting(WIDE, width)[1] for width in range(160, 40, -1)]
    assert [] in found and ["bubble"] in found and ["bubble", "MFU"] in found
    assert found == sorted(found, key=len)


def test_a_sentence_is_wrapped_at_spaces() -> None:
    lines = wrapped("estimated " * 30, 50).splitlines()
    assert len(lines) > 5 and all(len(line) <= 50 for line in lines)
    assert lines[1].startswith("  estimated")
