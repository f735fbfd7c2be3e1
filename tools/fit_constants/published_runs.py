"""Published training runs, as their sources state them: what constants are fitted on, or held against.

`RUNS`, `RECIPES` and `TRANSCRIBED` are CSVs of the same columns; `SOURCES.md` says where each row is from, and what to
beware of. Nothing in them is estimated, and an empty cell is not stated by its source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.planner.csv_runs.cells import records
from hyper_parallel.planner.csv_runs.rows import rows
from hyper_parallel.planner.metrics import mfu
from hyper_parallel.planner.table import Array, Table

RUNS = Path(__file__).with_name("training_runs.csv.gz")
"""4,082 runs; `csv_runs.rows.rows` and `csv_runs.cells.records` read it."""

RECIPES = Path(__file__).with_name("recipe_runs.csv")
"""98 more of NVIDIA's own recipes on H100, in 16 and in 8 bits; constants are fitted on them too."""
TRANSCRIBED = Path(__file__).with_name("transcribed_runs.csv")
"""102 more, most of other sources: no constant is fitted on them, so that they tell how estimates hold for what is
new."""


# Published runs as tables: configurations and measurements.
#
# Seconds of a step come from `iter_time_s`, or from tokens/s of a device or of all. The peak is in bytes; a source says
# GB or GiB, and nanotron's log says GB of what it divides by 2³⁰ (`create_table_log`). Rows of the playbook's
# interactive figure (S01) count for times by their upper envelope only. Rows of whole models that are fine-tuned do not
# count; rows of adapters do.

ENVELOPE = 0.20
"""Of the peak, in model FLOPs: what a row of the interactive figure has to reach to count."""
INTERACTIVE = "S01"
"""The source whose repeats differ by 5–25%."""
COMPUTED = "S02"
"""The source whose rows on one node look like sums of times of layers; `SOURCES.md` says by what."""


@dataclass(frozen=True)
class Evidence:
    """Published runs: what was configured and what was measured; nan where a source does not state it."""

    table: Table
    sources: NDArray[np.str_]
    hardware: NDArray[np.str_]
    models: NDArray[np.str_]
    seconds: Array
    peak: Array
    """Bytes."""
    ran: NDArray[np.bool_]
    timed: NDArray[np.bool_]
    """Rows whose times count."""
    computed: NDArray[np.bool_]
    """Rows whose times look computed and not measured: judged as their source gives them, and never fitted on."""
    transcribed: NDArray[np.bool_]
    """Rows of `TRANSCRIBED`, which are never fitted on either."""

    @property
    def fitted(self) -> NDArray[np.bool_]:
        """Rows that constants are fitted on."""
        return self.timed & ~self.computed & ~self.transcribed

    @property
    def groups(self) -> NDArray[np.str_]:
        """Source and hardware of each row."""
        return np.array(
            [f"{source}, {name}" for source, name in zip(self.sources, self.hardware, strict=True)]
        )

    def sets(self, *, alike: bool) -> NDArray[np.str_]:
        """Source, model, hardware and devices of each row: rows of a set are alternatives.

        `alike`: of one batch and length too, so that only how the model is spread differs.
        """
        t = self.table
        columns = (t.devices, t.sequence, t.batch) if alike else (t.devices,)
        names = [
            self.sources,
            self.models,
            self.hardware,
            *(np.broadcast_to(column, t.n) for column in columns),
        ]
        return np.array([", ".join(map(str, row)) for row in zip(*names, strict=True)])


def evidence(*paths: str | Path) -> Evidence:
    """Every run of some CSVs that can be estimated, with what was measured."""
    given = [record | {"path": str(path)} for path in paths for record in records(path)]
    table, found = rows(given)
    supported = [(row, record) for row, record in zip(found, given, strict=True) if row.index is not None]
    seconds = np.array([_number(record, "iter_time_s") for _, record in supported])
    # A step's time from tokens/s needs the batch, which may have been filled in.
    rate = np.array(
        [_rate(record, devices) for (_, record), devices in zip(supported, table.devices, strict=True)]
    )
    seconds = np.where(np.isnan(seconds), table.batch * table.sequence / rate, seconds)
    sources = np.array([row.source for row, _ in supported])
    ran = np.array([record["status"] == "ok" for _, record in supported])
    tuned = np.array(["task=SFT" in record["notes"] for _, record in supported])
    timed = ran & np.isfinite(seconds) & ~tuned
    timed &= ~((sources == INTERACTIVE) & (mfu(table, seconds) < ENVELOPE))
    return Evidence(
        table=table,
        sources=sources,
        hardware=np.array([row.hardware for row, _ in supported]),
        models=np.array([row.model for row, _ in supported]),
        seconds=seconds,
        peak=np.array([_peak(record) for _, record in supported]),
        ran=ran,
        timed=timed,
        transcribed=np.array([record["path"] == str(TRANSCRIBED) for _, record in supported]),
        computed=(sources == COMPUTED) & np.broadcast_to(table.devices <= table.node, table.n),
    )


def _number(record: Mapping[str, str], column: str) -> float:
    text = record.get(column) or ""
    return float(text) if text else math.nan


def _rate(record: Mapping[str, str], devices: float) -> float:
    """Tokens/s of all devices."""
    total = _number(record, "tokens_per_s_total")
    return _number(record, "tokens_per_s_per_device") * devices if math.isnan(total) else total


def _peak(record: Mapping[str, str]) -> float:
    binary = "GiB" in record.get("mem_kind", "") or "nanotron" in record.get("framework", "")
    unit = 2**30 if binary else 1e9
    return _number(record, "mem_gb") * unit
