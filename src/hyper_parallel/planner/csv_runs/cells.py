"""Strict reading of a CSV's cells; measured cells are removed first.

A run's row says what was trained, on what and how (`INPUTS`), and what was measured (`MEASURED`). `blind` keeps the
former alone, so that no estimate can see what it is judged on.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import math
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from hyper_parallel.errors import DataError

INPUTS = (
    *("row_id", "source_id", "trust", "model", "family", "params_b", "layers", "hidden", "heads", "kv_heads"),
    *("ffn", "ffn_gated", "vocab", "seq_len", "experts", "topk", "moe_ffn", "hardware", "n_devices"),
    *(
        "devices_per_node",
        "interconnect",
        "precision",
        "framework",
        "tp",
        "pp",
        "vp",
        "dp",
        "cp",
        "ep",
        "fsdp",
    ),
    *("zero", "sp", "mbs", "gbs", "grad_accum", "recompute", "offload", "pp_schedule", "notes"),
)
"""Columns that say what was run."""

MEASURED = (
    *("iter_time_s", "tokens_per_s_per_device", "tokens_per_s_total", "tflops_per_device", "flops_kind"),
    *("mfu_pct", "hfu_pct", "mem_gb", "mem_kind", "status"),
)
"""Columns that say what came of it."""

NEEDED = ("hardware", "n_devices")
"""Without these columns no row can be estimated."""

_OPTIONS = re.compile(r"\b(task|mp_mode|etp|packed|rank)=([\w-]+)")
WORDS = re.compile(
    r"(?<!\w)(deep-?ep|hybrid-?ep|all-?to-?all|(?:no )?(?:a2a|1f1b|ep)[- ]overlap|forced?[- ]balanc\w*|balanced gate|"
    r"loss in split|\(token ?drop\)|(?:no )?recorded graphs|fused router|no tp overlap|w/o mtp)",
    re.IGNORECASE,
)
"""What notes say of how a run was done: options, and words of dispatch; the rest of them may speak of results."""

_LARGEST = 1e12


Taken = TypeVar("Taken")


@dataclass(frozen=True)
class Cells:
    """The cells of one row, without what was measured."""

    line: int
    """Of the file; the header is line 1."""
    texts: Mapping[str, str]
    extra: int = 0
    """Cells beyond the header's."""
    filled: dict[str, str] = field(default_factory=dict)
    """By column: what was taken for an empty cell, and from where."""

    def take(self, column: str, value: Taken, why: str) -> Taken:
        """A value for what the row does not state, recorded with its reason."""
        self.filled[column] = f"{value}, {why}"
        return value

    def text(self, column: str) -> str:
        """A cell's text; empty where the row does not state it."""
        return self.texts.get(column, "")

    def number(self, column: str) -> float | None:
        """A cell's number, 0 or more; None where it is empty. Raises DataError for what is none."""
        if not self.text(column):
            return None
        value = self._value(column)
        if not 0 <= value <= _LARGEST:
            raise self.malformed(column, "a number, 0 or more")
        return value

    def count(self, column: str, least: int = 1) -> int | None:
        """A cell's whole number, `8` or `8.0`; None where it is empty. Raises DataError for what is none."""
        if not self.text(column):
            return None
        value = self._value(column)
        if not least <= value <= _LARGEST or value != int(value):
            raise self.malformed(column, f"a whole number of at least {least}")
        return int(value)

    def _value(self, column: str) -> float:
        text = self.text(column)
        try:
            # Python reads 1_000 as a thousand; no published table writes so.
            return math.nan if "_" in text else float(text)
        except ValueError:
            return math.nan

    def option(self, name: str) -> str:
        """The value of an option in the notes, `task=LoRA`; empty where they say nothing."""
        found: dict[str, str] = dict(_OPTIONS.findall(self.text("notes")))
        return found.get(name, "")

    def malformed(self, column: str, needed: str) -> DataError:
        """The error for a cell that cannot be read."""
        return DataError(
            f"line {self.line}, column {column}: got {self.text(column)!r}, needed is {needed}, or nothing where the "
            "run's source does not state it"
        )


def blind(record: Mapping[str, str]) -> dict[str, str]:
    """A row without what was measured: the columns of `INPUTS`, and of its notes the options alone."""
    kept = {column: record[column].strip() for column in INPUTS if record.get(column)}
    if "notes" in kept:
        options = [f"{name}={value}" for name, value in _OPTIONS.findall(kept["notes"])]
        kept["notes"] = "; ".join([*options, *WORDS.findall(kept["notes"])])
    return kept


def read(runs: str | Path | Iterable[Mapping[str, object]]) -> list[Cells]:
    """The rows of a CSV file, plain or ending in .gz, or of records of the same columns, blind.

    Raises DataError for a file that is no such CSV: the columns it lacks, or a column's name that is nearly one.
    """
    if isinstance(runs, (str, Path)):
        return _read_file(Path(runs))
    found = []
    for line, record in enumerate(runs, start=2):
        texts = {str(key): "" if value is None else str(value) for key, value in record.items()}
        found.append(Cells(line, blind(texts)))
    return found


def records(path: str | Path) -> list[dict[str, str]]:
    """The rows of a CSV file as they stand, measured columns included: for what fits and judges.

    Raises DataError as `read` does.
    """
    return [{key: value or "" for key, value in record.items() if key} for _, record in _lines(Path(path))]


def _read_file(path: Path) -> list[Cells]:
    found = []
    for line, record in _lines(path):
        extra = len(record.get(None) or ())  # type: ignore[call-overload]
        found.append(Cells(line, blind({key: value or "" for key, value in record.items() if key}), extra))
    return found


def _lines(path: Path) -> list[tuple[int, dict[str, str]]]:
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        # A byte-order mark is how some spreadsheets begin a file.
        text = content.decode("utf-8-sig")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} cannot be decompressed: {error}; give a CSV, or one compressed by gzip"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no text in UTF-8: byte {error.start}; give a CSV with a header") from None
    reader = csv.DictReader(text.splitlines(keepends=True))
    try:
        _check_header(path, reader.fieldnames or [])
        return [(reader.line_num, record) for record in reader]
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}; give a CSV with a header") from None


def _check_header(path: Path, header: Iterable[str]) -> None:
    names = list(header)
    known = (*INPUTS, *MEASURED)
    for name in names:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if name not in known and near and near[0] not in names:
            raise DataError(f"{path} has a column {name!r}, which is not known; did you mean {near[0]!r}?")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{path} has the column {twice[0]!r} more than once; give it once")
    missing = [name for name in NEEDED if name not in names]
    if missing:
        raise DataError(
            f"{path} lacks the column {missing[0]!r}; needed are {', '.join(NEEDED)}, and what says what was trained "
            f"and how, of {', '.join(INPUTS)}"
        )
