"""What a person asks for before anything runs comes without torch, and so at once."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hyper_parallel

COMMANDS = ("train", "verify", "inspect", "plan", "clusters", "export", "convert", "schema", "doctor")
PARTS = ("config", "strategy", "layout", "workload", "launch", "cli.main")
HEAVY = ("torch", "transformers", "numpy", "tokenizers", "safetensors", "datasets", "tensorboard")

# Runs the real command line in a fresh interpreter and says, after it, what it has imported.
PROBE = f"""
import sys
from hyper_parallel.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    code = end.code or 0
else:
    code = 0
print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)
sys.exit(code)
"""


@functools.cache
def run(*arguments: str, script: str = PROBE) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        *(("--help",), ("--version",), ("schema",), ("clusters",), ("clusters", "l4")),
        *((command, "--help") for command in COMMANDS),
    ],
)
def test_no_heavy_import(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert done.stderr.strip() == "[]"


def test_a_mistake_is_told_without_heavy_imports(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "version: 1\nout: x\nmodel: {path: nowhere}\ndata: {train: none.txt}\n"
    )
    for command in ("train", "verify"):
        done = run(command, str(tmp_path / "run.yaml"))
        assert done.returncode == 2
        told, imported = done.stderr.splitlines()
        assert told == "hyper-parallel: error: data.train: 'none.txt' does not exist"
        assert imported == "[]"


def test_these_parts_import_without_torch() -> None:
    script = (
        "import importlib, sys\n"
        f"for part in {PARTS!r}:\n"
        "    importlib.import_module(f'hyper_parallel.{part}')\n"
        "    if 'torch' in sys.modules: sys.exit(f'{part} imports torch')"
    )
    done = run(script=script)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_each_help_has_an_example_and_the_exit_codes(command: str) -> None:
    text = run(command, "--help").stdout
    assert f"hyper-parallel {command}" in text.split("Options:")[0].split("\n", 1)[1]
    assert "Exit codes:" in text
    assert "    0    " in text


def test_the_schema_is_what_an_editor_reads() -> None:
    schema = json.loads(run("schema").stdout)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["title"] == "HyperParallel run file"
    assert {"extends", "version", "out", "train", "strategy"} <= set(schema["properties"])
    strategy = json.loads(run("schema", "--strategy").stdout)
    assert "axes" in strategy["properties"]
    assert "order" not in strategy["$defs"]["Axes"]["properties"]


def test_it_runs_as_a_module_for_torchrun() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hyper_parallel", "--version"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("hyper-parallel, version ")
    assert Path(hyper_parallel.__file__ or "").name == "__init__.py"
