"""Every benchmark starts as a person starts it: by its path, with nothing on Python's path but what it puts there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
IMPORTED = {"commandline.py", "processes.py"}  # by the others, which start workers by them
SCRIPTS = sorted(
    path.name
    for path in FOLDER.glob("*.py")
    if '__name__ == "__main__"' in path.read_text() and path.name not in IMPORTED
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_shows_its_help(script: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    source = str(FOLDER.parent / "src")  # the package as it would be installed
    done = subprocess.run(
        [sys.executable, FOLDER / script, "--help"],
        env={**environment, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "usage" in done.stdout, done.stderr
