"""A newcomer's own model and chats: fine-tune until the answers stop by themselves, adapters, export, `verify`."""

from __future__ import annotations

import json

import pytest
import yaml

from harness.chat_model import CHATS, write_chats, write_model
from harness.person import Person

pytestmark = pytest.mark.timeout(600)

RUN = {
    "version": 1,
    "out": "run",
    "model": {"path": "base"},
    "data": {"train": "chats.jsonl", "holdout": 0, "sequence": 48},
    "train": {
        "steps": 60,
        "batch": 4,
        "optimizer": {"lr": 5e-3},
        "schedule": {"name": "constant"},
        "sample": {"tokens": 30, "temperature": 0},
        "log_every": 20,
    },
    "trackers": [],
}
SAME_LOGITS = """
import json, torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model, words = AutoModelForCausalLM.from_pretrained("exported"), AutoTokenizer.from_pretrained("exported")
said = {}
for line in open("answers.jsonl"):
    row = json.loads(line)
    asked = words.apply_chat_template(
        row["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = asked["input_ids"]
    with torch.no_grad():
        for token, logprob in zip(row["tokens"], row["logprobs"], strict=True):
            scores = model(input_ids=ids).logits[0, -1].float().log_softmax(-1)
            assert scores.argmax() == token, (scores.argmax(), token)
            assert abs(float(scores[token]) - logprob) < 1e-4, (float(scores[token]), logprob)
            ids = torch.cat([ids, torch.tensor([[token]])], 1)
    said[row["messages"][0]["content"]] = len(row["tokens"])
print(json.dumps(said))
"""

SAME_AS_PEFT = """
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

ids = torch.arange(10).unsqueeze(0)
with torch.no_grad():
    merged = AutoModelForCausalLM.from_pretrained("exported")(input_ids=ids).logits
    beside = AutoPeftModelForCausalLM.from_pretrained("peft")(input_ids=ids).logits
torch.testing.assert_close(beside, merged, atol=1e-3, rtol=0)
print("the same")
"""


@pytest.fixture
def owner(newcomer: Person) -> Person:
    """The newcomer with a model folder, as `save_pretrained` writes it, and conversations as JSON lines."""
    write_model(newcomer.folder / "base")
    write_chats(newcomer.folder / "chats.jsonl")
    newcomer.writes("run.yaml", yaml.safe_dump(RUN))
    lines = [json.dumps({"messages": [{"role": "user", "content": asked}]}) for asked, _ in CHATS]
    newcomer.writes("prompts.jsonl", "\n".join(lines) + "\n")
    return newcomer


def answers(person: Person, model: str) -> list[dict[str, object]]:
    """What a model answers to the questions of the chats, greedily."""
    (person.folder / "answers.jsonl").unlink(missing_ok=True)
    person.types(
        f"hyper-parallel generate {model} --input prompts.jsonl --out answers.jsonl "
        "inference.temperature=0 inference.max_tokens=40 inference.logprobs=true"
    )
    rows = [json.loads(line) for line in (person.folder / "answers.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("digest")  # of the model's folder, too
    return rows


def test_fine_tune_until_it_stops_by_itself_then_export(owner: Person) -> None:
    shown = owner.types("hyper-parallel train run.yaml")
    asked, said = CHATS[0]
    assert f"user\n{asked}\nassistant\n{said}" in shown
    found = answers(owner, "run")
    assert [row["text"] for row in found] == [said for _, said in CHATS]
    assert {row["finish"] for row in found} == {"stop"}, "an answer did not end by itself"
    owner.types("hyper-parallel export run exported")
    assert answers(owner, "exported") == found
    [printed] = [line for line in owner.python(SAME_LOGITS).splitlines() if line.startswith("{")]
    lengths = json.loads(printed)
    assert lengths.keys() == {asked for asked, _ in CHATS}


def test_verify_on_own_chats(owner: Person) -> None:
    shown = owner.types(
        "hyper-parallel verify run.yaml strategy.axes='{shard: 2, tensor: 2}' strategy.sequence=true"
    )
    assert "shard 2 · tensor_x 2" in shown and "right: " in shown


def test_adapters(owner: Person) -> None:
    shown = owner.types("hyper-parallel train run.yaml out=adapters model.adapter='{rank: 8}' train.steps=8")
    assert "step 8/8" in shown
    assert "hyper-parallel: error" not in shown
    shown = owner.types("hyper-parallel train run.yaml out=adapters model.adapter='{rank: 8}' train.steps=40")
    assert "resumed from" in shown and "step 40/40" in shown
    asked, _ = CHATS[0]
    chat = f"--chat '{asked}' inference.max_tokens=40"
    owner.types("hyper-parallel export adapters exported")
    answer = owner.types(f"hyper-parallel generate exported {chat}")
    assert answer == owner.types(f"hyper-parallel generate adapters {chat}")
    assert answer != owner.types(f"hyper-parallel generate base {chat}"), "the adapters change nothing"
    owner.types("hyper-parallel export adapters peft --adapter")
    assert "the same" in owner.python(SAME_AS_PEFT)
