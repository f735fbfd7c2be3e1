"""A first fine-tune as its user goes through it: the wheel is installed, the folder is empty, nothing is near by.

Model folder with tokenizer and template → chats as JSON lines → `train` → `export` → `generate` stops by itself → the
logits are those of Transformers' own Trainer on the same rows. Then adapters, in both Trainers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from harness.chat_model import CHATS, write_chats, write_model

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
EARLY = 4
"""Steps after which logits are compared. Later, what differs is how roundings grew: at this learning rate, fast."""
RUN = {
    "version": 1,
    "out": "run",
    "model": {"path": "base"},
    "data": {"train": "chats.jsonl", "holdout": 0, "sequence": 48, "cache": "cache"},
    "train": {
        "steps": 60,
        "batch": 4,
        # Above the gradients that rounding decides, of which Adam would make whole steps.
        "optimizer": {"lr": 5e-3, "eps": 1e-5},
        "schedule": {"name": "constant"},
        "sample": {"tokens": 30, "temperature": 0},
        "log_every": 60,
    },
    "checkpoint": {"every": EARLY, "keep": 20},
    "trackers": [],
}
ROTATED = [(asked, CHATS[at - 1][1]) for at, (asked, _) in enumerate(CHATS)]
"""Other answers to the same questions, for adapters to learn."""
CLOSE = 2e-5
"""Of the largest logit, for two programs that sum in different orders."""


def run(folder: Path, *command: str) -> str:
    """What a command prints, in a folder where nothing but the wheel is found."""
    environment = {
        **{
            key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RANK", "WORLD_SIZE")
        },
        "PYTHONPATH": str(folder / "site"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def with_trainer(folder: Path, *given: str, ranks: int = 0) -> str:
    several = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)) if ranks else ()
    return run(folder, sys.executable, *several, "with_trainer.py", *given)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder with the wheel installed beside a model folder and chats."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("somewhere")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    wheels = str(folder / "wheels")
    run(folder, *pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", wheels, str(source))
    [wheel] = (folder / "wheels").iterdir()
    run(folder, *pip, "install", "-q", "--no-deps", "--no-index", "--target", "site", str(wheel))
    shutil.rmtree(source)
    shutil.copy(Path(__file__).with_name("with_trainer.py"), folder)
    write_model(folder / "base")
    write_chats(folder / "chats.jsonl")
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN))
    return folder


@pytest.fixture(scope="module")
def chat_model(place: Path) -> Path:
    """What `train` and `export` make of the model folder."""
    command = str(place / "site" / "bin" / "hyper-parallel")
    shown = run(place, command, "train", "run.yaml", "launch.workers=1")
    asked, said = CHATS[0]
    assert f"user\n{asked}\nassistant\n{said}" in shown
    run(place, command, "export", "run", "exported")
    run(place, command, "export", f"run/checkpoints/step-{EARLY:08d}", "early")
    (place / "early.yaml").write_text(yaml.safe_dump({"extends": "run.yaml", "train": {"steps": EARLY}}))
    return place / "exported"


def test_it_answers_and_stops_and_its_logits_are_those_of_the_trainer(place: Path, chat_model: Path) -> None:
    told = with_trainer(
        place,
        *("look", "chats.jsonl", chat_model.name),
        *("then", "plain", "early.yaml", "base", "trainer"),
        *("then", "look", "chats.jsonl", "early", "trainer", "base"),
    )
    answers, logits = (json.loads(line) for line in told.splitlines() if line.startswith('{"right"'))
    assert answers["right"] == [True] * len(CHATS)
    trainer, base = logits["apart"]
    assert trainer < CLOSE, trainer
    assert base > 1000 * CLOSE, base


def test_nothing_in_it_names_the_place_that_it_came_from(place: Path, chat_model: Path) -> None:
    for path in chat_model.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        assert str(place).encode() not in data and b"name_or_path" not in data, path.name
    names = {path.name for path in chat_model.iterdir()}
    assert {path.name for path in (place / "base").iterdir()} <= names


def test_adapters_in_the_trainer(place: Path, chat_model: Path) -> None:
    write_chats(place / "rotated.jsonl", ROTATED)
    lora = {**RUN, "data": {**RUN["data"], "train": "rotated.jsonl"}, "model": {"path": chat_model.name}}
    lora["train"] = {**RUN["train"], "optimizer": {"lr": 1e-2, "eps": 1e-5}}
    (place / "lora.yaml").write_text(json.dumps(lora))
    (place / "lora-early.yaml").write_text(json.dumps({"extends": "lora.yaml", "train": {"steps": EARLY}}))
    with_trainer(place, "spread", "lora.yaml", chat_model.name, "adapters-spread", ranks=2)
    told = with_trainer(
        place,
        *("lora", "lora-early.yaml", chat_model.name, "adapters-plain", "then"),
        *("look", "rotated.jsonl", *[chat_model.name] * 3),
        *("--adapters", "adapters-spread", "adapters-plain", "adapters-spread-early"),
    )
    (seen,) = (json.loads(line) for line in told.splitlines() if line.startswith('{"right"'))
    assert seen["right"] == [True] * len(CHATS)
    plain, early = (
        place / name / "adapter_model.safetensors" for name in ("adapters-plain", "adapters-spread-early")
    )
    expected, found = load_file(plain), load_file(early)
    assert expected.keys() == found.keys()
    assert all((found[name] - value).abs().max() < CLOSE for name, value in expected.items())
    names = {path.name for path in (place / "adapters-spread").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert "model.safetensors" not in names
