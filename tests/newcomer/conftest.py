"""An empty folder and the installed wheel: what someone has who has just typed `pip install hyper-parallel`.

The wheel is built from a copy of the sources and installed into a new environment. PyTorch and the other dependencies
are those of the environment that runs the tests, which a `.pth` line makes importable; a second installation would take
minutes. Nothing of the source tree is importable: there is no PYTHONPATH, and Python does not read the `.pth` files of
a folder that a `.pth` line names, so that an editable installation stays out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.person import Person

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel, built from what the repository has now."""
    place = tmp_path_factory.mktemp("installation")
    source = place / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    )
    quiet = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")

    def do(*command: str) -> None:
        done = subprocess.run(command, cwd=place, env=quiet, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"

    do(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "wheels", str(source))
    shutil.rmtree(source)
    [wheel] = (place / "wheels").iterdir()
    venv = place / "venv"
    do(sys.executable, "-m", "venv", "--without-pip", str(venv))
    own = next(venv.glob("lib/python*/site-packages"))
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = str(venv / "bin" / "python")
    do(*pip, "--python", python, "install", "-q", "--no-deps", "--no-index", "--ignore-installed", str(wheel))
    # The entry point that the wheel of PyTorch would have added.
    torchrun = venv / "bin" / "torchrun"
    torchrun.write_text(f"#!{python}\nfrom torch.distributed.run import main\n\nmain()\n")
    torchrun.chmod(0o755)
    return venv


@pytest.fixture
def newcomer(installation: Path, tmp_path: Path) -> Iterator[Person]:
    """A person in an empty folder, with an empty home and nothing but the installed wheel on the path."""
    home, folder = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    folder.mkdir()
    environment = {
        "PATH": f"{installation / 'bin'}:/usr/bin:/bin",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
    }
    person = Person(folder=folder, environment=environment)
    where = person.types("python -c 'import hyper_parallel; print(hyper_parallel.__file__)'").strip()
    assert Path(where).is_relative_to(installation), where
    yield person
    left = {path.name for path in home.iterdir()} - {".cache", ".config", ".local"}
    assert not left, f"commands left {left} in the home folder"


@pytest.fixture
def clone(newcomer: Person) -> Person:
    """The same person after `git clone` in the same folder: there is `examples/`."""
    shutil.copytree(
        ROOT / "examples", newcomer.folder / "examples", ignore=shutil.ignore_patterns("__pycache__")
    )
    return newcomer
