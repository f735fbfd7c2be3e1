"""The files of examples/sft, as their comments say: a model folder, chat.yaml until it stops, then lora.yaml."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

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


def generated(place: Path, model: str) -> list[dict[str, Any]]:
    """What a model answers to the questions, greedily."""
    out = place / "runs/sft/answers.jsonl"
    out.unlink(missing_ok=True)
    asked = ("--input", "examples/sft/questions.jsonl", "--out", str(out))
    settings = ("inference.max_tokens=60", "inference.temperature=0", "inference.logprobs=true")
    cli(place, "generate", model, *asked, *settings)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    for row in rows:
        row.pop("digest")  # of the model's folder, too
    return rows


def test_the_model_answers_and_stops_by_itself(place: Path) -> None:
    """Also before it is exported; and every token is the most probable one of Transformers' model."""
    found = generated(place, "runs/sft/exported")
    wanted = answers(CHATS)
    assert len(found) == 3
    model = AutoModelForCausalLM.from_pretrained(place / "runs/sft/exported")
    words = AutoTokenizer.from_pretrained(place / "runs/sft/exported")
    for row in found:
        assert row["finish"] == "stop"
        assert row["text"] == wanted[row["messages"][0]["content"]]
        asked = words.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=True)
        ids = torch.tensor([[*asked["input_ids"], *row["tokens"]]])
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits[0, -len(row["tokens"]) - 1 : -1].log_softmax(-1)
        assert logprobs.argmax(-1).tolist() == row["tokens"]
        assert logprobs.amax(-1).tolist() == pytest.approx(row["logprobs"], abs=1e-4)
    assert generated(place, "runs/sft/chat") == found


def test_adapters_learn_other_answers(place: Path) -> None:
    """In two runs, of which the second goes on; merged into an export they answer as they do beside the model."""
    assert answers(ROOT / "examples/sft/yes_or_no.jsonl").keys() & answers(CHATS).keys() == set()
    assert "step 30/30" in cli(place, "train", "examples/sft/lora.yaml", "train.steps=30")
    shown = cli(place, "train", "examples/sft/lora.yaml")
    assert "resumed from" in shown
    asked, said = "Does an all-reduce sum tensors?", "Yes."
    assert f"{asked}\nassistant\n{said}" in shown
    losses = [
        json.loads(line).get("loss")
        for line in (place / "runs/sft/lora/metrics.jsonl").read_text().splitlines()
    ]
    losses = [loss for loss in losses if loss is not None]
    assert losses[0] > 6 and losses[-1] < 3
    cli(place, "export", "runs/sft/lora", "runs/sft/merged")
    chat = ("--chat", asked, "inference.max_tokens=20", "inference.temperature=0")
    answer = cli(place, "generate", "runs/sft/lora", *chat)
    assert said in answer
    assert cli(place, "generate", "runs/sft/merged", *chat) == answer
    assert cli(place, "generate", "runs/sft/exported", *chat) != answer, "the adapters change nothing"


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("chat", ("strategy.axes={shard: 2, tensor: 2}", "strategy.sequence=true")), ("lora", ())],
)
def test_several_workers_compute_what_one_device_computes(
    place: Path, name: str, strategy: tuple[str, ...]
) -> None:
    assert "right: " in cli(place, "verify", f"examples/sft/{name}.yaml", *strategy)
