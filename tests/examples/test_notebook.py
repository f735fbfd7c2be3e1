"""examples/first_steps.ipynb runs from its first cell to its last, in a kernel of this interpreter."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.runner import ROOT

nbformat = pytest.importorskip("nbformat", reason="part of the extra 'dev'")
nbclient = pytest.importorskip("nbclient", reason="part of the extra 'dev'")
pytest.importorskip("ipykernel", reason="part of the extra 'dev'")

NOTEBOOK = ROOT / "examples/first_steps.ipynb"


def shown(cell: Any) -> str:
    """What a cell printed, and its value."""
    return "".join(one.get("text") or one.get("data", {}).get("text/plain", "") for one in cell.outputs)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The cells with code, executed."""
    folder = tmp_path_factory.mktemp("notebook")
    command = folder / "bin" / "hyper-parallel"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m hyper_parallel "$@"\n')
    command.chmod(0o755)
    paths = {
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    # The specification that ipykernel installs starts `python`; this one starts the interpreter of the tests.
    spec = folder / "kernels" / "python3"
    spec.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "", "language": "python"}))
    patch = pytest.MonkeyPatch()
    for name, value in {**paths, "JUPYTER_PATH": str(folder)}.items():
        patch.setenv(name, value)
    try:
        nbclient.NotebookClient(
            notebook, timeout=200, resources={"metadata": {"path": str(folder)}}
        ).execute()
    finally:
        patch.undo()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def of(cells: list[Any], part: str) -> str:
    [found] = [cell for cell in cells if part in cell.source]
    return shown(found)


def value(cells: list[Any], part: str) -> str:
    """The value of the cell's last line."""
    [found] = [cell for cell in cells if part in cell.source]
    return str(found.outputs[-1]["data"]["text/plain"])


def test_the_cells_show_what_the_text_says(cells: list[Any]) -> None:
    assert "hyper-parallel: error" not in "".join(map(shown, cells))
    assert float(value(cells, "summary.final_loss")) < 0.5
    assert "right: " in of(cells, "hyper-parallel verify")
    assert "shard" in of(cells, "hyper-parallel plan")
    assert "says how it is split" in of(cells, "hyper-parallel generate")


def test_no_output_is_stored() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None
    assert str(Path.home()) not in NOTEBOOK.read_text()
