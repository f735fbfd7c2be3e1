"""The campaign of signals on a real run: one of each kind of case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "signals.py"


@pytest.mark.matrix  # the same, without the script, in tests/launch/test_signals.py
def test_a_stop_is_saved_and_goes_on_and_a_frozen_rank_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, SCRIPT, "--moments", "1", "--freezes", "1", "--shard", "4/5"),
            *("--folder", tmp_path, "--out", tmp_path),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "cases-4-5.jsonl").read_text().splitlines()]
    assert [(row["signal"], row["whom"]) for row in rows] == [("SIGINT", "command"), ("SIGSTOP", "worker")]
    assert all(row["ok"] for row in rows), rows
