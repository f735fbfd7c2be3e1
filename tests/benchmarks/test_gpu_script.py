"""The accelerator benchmark stays runnable: every part of it once, small, on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.mark.matrix
def test_a_rehearsal_runs_every_part_and_says_that_it_is_one() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--rehearse"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the figures mean nothing" in done.stdout
    assert "WRONG" not in done.stdout
    assert "ratio" in done.stdout
