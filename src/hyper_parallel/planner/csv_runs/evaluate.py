"""Estimates of the runs of a CSV: one object a row, in the file's order.

Each has `step_time_s`, `tokens_per_s_per_device`, `mfu` (0 to 1, of the peak in the run's precision), `peak_memory_gb`
(10⁹ bytes of the fullest rank), `fits`, `interval` (tokens/s of a device that hold 90% of such runs, least and most)
and `filled` (by column, what was taken for an empty cell and from where); or `unsupported`, with the reason. Nothing
that a row says of its measurement is seen (`cells.blind`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.planner.constants import Constants, fitted
from hyper_parallel.planner.cost_model.step import estimate
from hyper_parallel.planner.csv_runs.rows import RunRow, rows
from hyper_parallel.planner.error_interval import between
from hyper_parallel.planner.metrics import mfu, tokens_per_second
from hyper_parallel.planner.table import Array


def evaluate(
    runs: str | Path | Iterable[Mapping[str, object]], constants: Constants | None = None
) -> list[dict[str, Any]]:
    """The estimate of each run; see the module. Raises DataError for a file that is no CSV of runs."""
    table, found = rows(runs)
    if table.layers.size == 0:
        return [_object(row, {}) for row in found]
    estimates = estimate(table, constants or fitted())
    least, most = between(table, estimates)
    columns: dict[str, Array] = {
        "step_time_s": estimates.seconds,
        "tokens_per_s_per_device": tokens_per_second(table, estimates.seconds),
        "mfu": mfu(table, estimates.seconds),
        "peak_memory_gb": estimates.peak / 1e9,
        "fits": np.asarray(estimates.fits, dtype=np.float64),
        "low": tokens_per_second(table, most),
        "high": tokens_per_second(table, least),
    }
    columns = {name: column + np.zeros(table.n) for name, column in columns.items()}
    return [_object(row, columns) for row in found]


def _object(row: RunRow, columns: Mapping[str, Array]) -> dict[str, Any]:
    record: dict[str, Any] = {
        "row_id": row.id,
        "line": row.line,
        "model": row.model,
        "hardware": row.hardware,
    }
    if row.index is None:
        return {**record, "unsupported": row.unsupported}
    values = {name: float(column[row.index]) for name, column in columns.items()}
    low, high = values.pop("low"), values.pop("high")
    fits = bool(values.pop("fits"))
    record |= {"framework": row.profile, "cluster": row.cluster}
    return {**record, **values, "fits": fits, "interval": [low, high], "filled": dict(row.filled)}


def text(records: Sequence[Mapping[str, Any]]) -> str:
    """The same as a table for the terminal, and how often which reason left a row without an estimate."""
    lines = [
        "estimated",
        _line(("row", "model", "hardware", "step", "tokens/s", "90% interval", "MFU", "peak", "")),
    ]
    lines += [_row_line(one) for one in records]
    without = sum("unsupported" in one for one in records)
    lines.append(
        f"{len(records) - without} of {len(records)} rows; tokens/s are those of one device, GB are 10⁹ bytes"
    )
    return "\n".join(lines)


def _row_line(one: Mapping[str, Any]) -> str:
    head = (one["row_id"] or f"line {one['line']}", one["model"], one["hardware"])
    if "unsupported" in one:
        return _line((*head, f"unsupported: {one['unsupported']}"))
    low, high = one["interval"]
    figures = (
        f"{one['step_time_s']:.4g} s",
        f"{one['tokens_per_s_per_device']:,.0f}",
        f"{low:,.0f}–{high:,.0f}",
        f"{one['mfu']:.1%}",
        f"{one['peak_memory_gb']:.1f} GB",
        "" if one["fits"] else "does not fit",
    )
    return _line((*head, *figures))


_WIDTHS = (9, 20, 18, 11, 10, 17, 7, 10, 0)


def _line(cells: Sequence[str]) -> str:
    padded = [
        cell[:width].ljust(width) if i < 3 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, _WIDTHS[: len(cells)], strict=True))
    ]
    return "  ".join(padded).rstrip()
