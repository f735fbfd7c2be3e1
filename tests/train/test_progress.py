"""What is shown while a run trains."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hyper_parallel.train.summary import Progress, line

RECORD = {
    "loss": 5.7448,
    "grad_norm": 1.661,
    "lr": 2.98e-4,
    "tokens_per_second": 1234.0,
    "mfu": 0.41,
    "memory": 2.0**30,
}


def test_a_terminal_of_80_columns_drops_memory_and_learning_rate() -> None:
    assert line(7, 1000, RECORD, 100.0, 200) == line(7, 1000, RECORD, 100.0)
    shown = "step    7/1000  loss 5.7448  grad 1.661  1.2K tok/s  MFU 41.0%  ETA 1m 40s"
    assert line(7, 1000, RECORD, 100.0, 80) == shown


@given(width=st.integers(1, 200))
def test_a_narrow_terminal_shows_whole_cells_and_the_loss_to_the_last(width: int) -> None:
    whole = line(7, 1000, RECORD, 100.0).split("  ")
    shown = line(7, 1000, RECORD, 100.0, width)
    assert "loss 5.7448" in shown
    assert [cell for cell in whole if cell in shown.split("  ")] == shown.split("  ")
    assert len(shown) <= max(width, len("step    7/1000  loss 5.7448"))


def test_the_live_line_fits_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")  # with `dumb` nothing is drawn
    console = Console(file=io.StringIO(), force_terminal=True, width=40, legacy_windows=False)
    progress = Progress(0, 2, console)
    progress.step(2, RECORD, float("nan"))
    progress.close()
    drawn = console.file.getvalue().removeprefix("\x1b[?25l").partition("\r")[0]
    assert drawn == "step 2/2  loss 5.7448  1.2K tok/s"
