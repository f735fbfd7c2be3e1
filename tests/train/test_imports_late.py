"""What training does not need at its start is not imported then: PyTorch for names, the engine that samples."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("hyper_parallel.train", "torch"),
        ("hyper_parallel.train.trainer", "hyper_parallel.inference.engine"),
        ("hyper_parallel.planner.auto.entry", "hyper_parallel.inference.engine"),
    ],
)
def test_it_is_not_imported(module: str, absent: str) -> None:
    program = f"import sys, {module}\nsys.exit({absent!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
