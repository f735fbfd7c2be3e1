"""The files of examples/sft, as their comments say: a model folder, chat.yaml until it stops, then lora.yaml."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.runner import ROOT, cli, folder_with_examples, script

CHATS = ROOT / "examples/sft/chats.jsonl"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what make_model.py writes and what chat.yaml makes of it."""
    folder = folder_with_examples(tmp_path_factory.mktemp("sft"))
    assert "new weights" in script(folder, "examples/sft/make_model.py")
    cli(folder, "train", "examples/sft/chat.yaml")
    cli(folder, "export", "runs/sft/chat", "runs/sft/exported")
    return folder


def answers(file: Path) -> dict[str, str]:
    """Each question with what the training text answers."""
    turns = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    return {asked["content"]: said["content"] for asked, said in turns}


def test_the_model_answers_and_stops_by_itself(place: Path) -> None:
    cli(
        place,
        *("generate", "runs/sft/exported", "--input", "examples/sft/questions.jsonl"),
        *("--out", "runs/sft/answers.jsonl", "inference.max_tokens=60", "inference.temperature=0"),
    )
    found = [json.loads(line) for line in (place / "runs/sft/answers.jsonl").read_text().splitlines()]
    wanted = answers(CHATS)
    assert len(found) == 3
    for row in found:
        assert row["finish"] == "stop"
        assert row["text"] == wanted[row["messages"][0]["content"]]


def test_adapters_learn_other_answers(place: Path) -> None:
    assert answers(ROOT / "examples/sft/yes_or_no.jsonl").keys() & answers(CHATS).keys() == set()
    shown = cli(place, "train", "examples/sft/lora.yaml")
    assert "Does an all-reduce sum tensors?\nassistant\nYes." in shown
    losses = [
        json.loads(line).get("loss")
        for line in (place / "runs/sft/lora/metrics.jsonl").read_text().splitlines()
    ]
    losses = [loss for loss in losses if loss is not None]
    assert losses[0] > 6 and losses[-1] < 3


@pytest.mark.parametrize("name", ["chat", "lora"])
def test_two_workers_compute_what_one_device_computes(place: Path, name: str) -> None:
    assert "right: " in cli(place, "verify", f"examples/sft/{name}.yaml")
