"""What a user types: LlamaFactory's command and torchrun start workers, and what is wrong is one clear line."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import made
import pytest
import yaml
from runs import command, losses

from hyper_parallel.errors import PREFIX

LAUNCHED = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2"}


def run_file(place: Path, folder: Path, fields: Any, model: str = "llama", **more: Any) -> Path:
    folder.mkdir()
    (folder / "hp.json").write_text(json.dumps(fields))
    options = made.options(place, model, folder / "out", 2, max_steps=2, save_steps=2, **more)
    file = folder / "train.yaml"
    file.write_text(yaml.safe_dump({**options, "use_hyper_parallel": True, "hyper_parallel_args": "hp.json"}))
    return file


def told(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines of ours; see that there is no traceback of a worker."""
    assert done.returncode != 0
    assert "hyper_parallel/" not in done.stderr, done.stderr
    return [line for line in done.stderr.splitlines() if PREFIX in line]


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        ("llamafactory-cli train train.yaml", LAUNCHED),
        ("torchrun --nproc-per-node 2 -m llamafactory.cli train train.yaml", {}),
        ("torchrun --nproc-per-node 2 -m llamafactory.launcher train.yaml", {}),
    ],
    ids=["llamafactory-cli", "torchrun cli", "torchrun launcher"],
)
def test_the_commands(words: str, environment: dict[str, str], place: Path, tmp_path: Path) -> None:
    run_file(place, tmp_path / "run", {"tp_size": 2})
    done = command(words.split(), tmp_path / "run", **environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(losses(tmp_path / "run/out")) == [1, 2]
    assert (tmp_path / "run/out/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("fields", "model", "line"),
    [
        ({"tp_sise": 2}, "llama", "hp.json: unknown field 'tp_sise'; did you mean 'tp_size'?"),
        (
            {"tp_size": 4},
            "llama",
            "hyper_parallel_args: tp_size 4 = 4 does not divide the number of workers, 2; start a multiple of 4 "
            "workers, or make the sizes divide 2",
        ),
        ({"cp_size": 2}, "falcon", "FalconForCausalLM"),
        ({"ep_size": 2}, "llama", "axes.expert is 2, but LlamaForCausalLM has no experts"),
    ],
    ids=["a bad field", "a world that does not fit", "a family without context", "no experts"],
)
def test_what_is_wrong_is_one_line(
    fields: dict[str, Any], model: str, line: str, place: Path, tmp_path: Path
) -> None:
    run_file(place, tmp_path / "run", fields, model)
    found = told(command(["llamafactory-cli", "train", "train.yaml"], tmp_path / "run", **LAUNCHED))
    assert len(found) == 1 and found[0].startswith(PREFIX) and line in found[0], found
