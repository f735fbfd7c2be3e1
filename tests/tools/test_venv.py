"""Making the virtual environment: refused in one line where Python is too old, left alone where it is current."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "venv.sh"


def run(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    return subprocess.run(
        [str(SCRIPT), str(folder)], capture_output=True, text=True, env={**kept, **environment}, timeout=120
    )


def interpreter(path: Path, version: str) -> Path:
    """Something that answers as Python of an old version does to the script's two questions."""
    path.write_text(f'#!/bin/sh\ncase "$2" in *sys.exit*) exit 1;; *) echo {version};; esac\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A virtual environment without pip: installing into it fails at once."""
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    return folder


def stamp() -> str:
    files = [ROOT / "requirements/lock.txt", ROOT / "pyproject.toml", ROOT / "src/hyper_parallel/_version.py"]
    sums = subprocess.run(
        ["cksum"], input=b"".join(f.read_bytes() for f in files), capture_output=True, check=True
    )
    return f"{sys.version_info.major}.{sys.version_info.minor} {sums.stdout.decode()}"


def test_an_old_python_is_refused_in_one_line(tmp_path: Path) -> None:
    old = interpreter(tmp_path / "python", "3.9")
    done = run(tmp_path / "venv", PYTHON=str(old))
    assert done.returncode == 2
    assert done.stderr == f"hyper-parallel: needs Python 3.11 or newer, but PYTHON={old} is 3.9\n"
    assert not (tmp_path / "venv").exists()


def test_a_python_that_does_not_run_is_refused_in_one_line(tmp_path: Path) -> None:
    done = run(tmp_path / "venv", PYTHON="/nowhere/python")
    assert done.returncode == 2
    assert done.stderr.endswith("but PYTHON=/nowhere/python is not a Python that runs\n")


def test_only_old_ones_on_the_path(tmp_path: Path) -> None:
    bin = tmp_path / "bin"
    bin.mkdir()
    for tool in ("bash", "sh", "dirname", "cat", "cksum"):
        (bin / tool).symlink_to(subprocess.check_output(["which", tool], text=True).strip())
    interpreter(bin / "python3", "3.8")
    done = run(tmp_path / "venv", PATH=str(bin))
    assert done.returncode == 2
    assert done.stderr.startswith(
        "hyper-parallel: needs Python 3.11 or newer, but python3 is 3.8; install one"
    )
    assert done.stderr.count("\n") == 1


def test_a_current_environment_is_left_alone(empty: Path) -> None:
    (empty / ".hyper-parallel").write_text(stamp())
    done = run(empty)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_changed_lock_installs_again_and_a_failure_is_not_stamped(empty: Path) -> None:
    (empty / ".hyper-parallel").write_text("3.11 123 456\n")
    done = run(empty)
    assert done.returncode == 2
    assert "Installing the pinned dependencies" in done.stdout
    assert done.stderr.splitlines()[-1].startswith(
        "hyper-parallel: the pinned dependencies could not be installed"
    )
    assert not (empty / ".hyper-parallel").exists()


def test_help_names_every_target() -> None:
    shown = subprocess.run(
        ["make", "-s", "-C", str(ROOT), "help"], capture_output=True, text=True, timeout=60
    ).stdout
    for target in ("train", "test", "matrix", "lint", "format", "clean", "help"):
        assert f"\n  {target} " in shown
