"""Published training runs, as their sources state them: what constants are fitted on, or held against.

`RUNS`, `RECIPES` and `TRANSCRIBED` are CSVs of the same columns; `SOURCES.md` says where each row is from, and what to
beware of. Nothing in them is estimated, and an empty cell is not stated by its source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from hyper_parallel.planner.fit.cross_validation import ENVELOPE, Evidence
from hyper_parallel.planner.fit.csv_cells import records
from hyper_parallel.planner.fit.csv_rows import rows
from hyper_parallel.planner.metrics import mfu

RUNS = Path(__file__).with_name("training_runs.csv.gz")
"""4,082 runs; `fit.rows.rows` and `fit.cells.records` read it."""

RECIPES = Path(__file__).with_name("recipe_runs.csv")
"""98 more of NVIDIA's own recipes on H100, in 16 and in 8 bits; constants are fitted on them too."""
TRANSCRIBED = Path(__file__).with_name("transcribed_runs.csv")
"""71 more, of other sources: no constant is fitted on them, so that they tell how estimates hold for what is new."""


# Published runs as tables: configurations and measurements.
#
# Seconds of a step come from `iter_time_s`, or from tokens/s of a device or of all. The peak is in bytes; a source says
# GB or GiB, and nanotron's log says GB of what it divides by 2³⁰ (`create_table_log`). Rows of the playbook's
# interactive figure (S01) count for times by their upper envelope only. Rows of whole models that are fine-tuned do not
# count, since they pack sequences of other lengths; rows of adapters do.

INTERACTIVE = "S01"
"""The source whose repeats differ by 5–25%."""
COMPUTED = "S02"
"""The source whose rows on one node look like sums of times of layers; `evidence/SOURCES.md` says by what."""


def evidence(*paths: str | Path) -> Evidence:
    """Every run of some CSVs that can be estimated, with what was measured."""
    given = [record for path in paths for record in records(path)]
    table, found = rows(given)
    supported = [(row, record) for row, record in zip(found, given, strict=True) if row.index is not None]
    seconds = np.array([_seconds(record) for _, record in supported])
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
        computed=(sources == COMPUTED) & np.broadcast_to(table.devices <= table.node, table.n),
    )


def _number(record: Mapping[str, str], column: str) -> float:
    text = record.get(column) or ""
    return float(text) if text else math.nan


def _seconds(record: Mapping[str, str]) -> float:
    return _number(record, "iter_time_s")


def _rate(record: Mapping[str, str], devices: float) -> float:
    """Tokens/s of all devices."""
    total = _number(record, "tokens_per_s_total")
    return _number(record, "tokens_per_s_per_device") * devices if math.isnan(total) else total


def _peak(record: Mapping[str, str]) -> float:
    binary = "GiB" in record.get("mem_kind", "") or "nanotron" in record.get("framework", "")
    unit = 2**30 if binary else 1e9
    return _number(record, "mem_gb") * unit
