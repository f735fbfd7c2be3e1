"""Prompts are read strictly, and a batch that was stopped goes on without repeating an answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hyper_parallel.errors import DataError
from hyper_parallel.inference import Completion
from hyper_parallel.inference.batch import AnswerFile, read_prompts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: must be an object"),
        ("{}", "neither prompt nor messages"),
        ('{"promt": "a"}', "did you mean 'prompt'"),
        ('{"prompt": "a", "messages": []}', "has prompt and messages"),
        ('{"prompt": 3}', "prompt must be text; got int"),
        ('{"prompt": "\\ud800"}', "lone surrogate"),
        ('{"prompt": "a", "text": "b"}', "has the key 'text'"),
        ('{"messages": []}', "messages must be a list"),
        ('{"messages": [{"role": "user"}]}', "messages must be a list"),
    ],
)
def test_a_line_that_is_wrong(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        read_prompts(file)


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="no prompts"):
        read_prompts(tmp_path / "empty.jsonl")


def _answers(folder: Path, seed: int = 0) -> AnswerFile:
    prompts = folder / "prompts.jsonl"
    prompts.write_text(
        '{"prompt": "a", "id": 1}\n\n{"messages": [{"role": "user", "content": "b"}]}\n{"prompt": "ä"}\n'
    )
    return AnswerFile(folder / "answers.jsonl", read_prompts(prompts), 2, {"seed": seed})


def test_a_batch_that_was_stopped_goes_on(tmp_path: Path) -> None:
    answers = _answers(tmp_path)
    assert len(answers.missing) == 6
    with answers.writing() as file:
        answers.add(file, (2, 1), Completion(tokens=[1], text="ü"))
        answers.add(file, (0, 0), Completion(tokens=[2], text="x", logprobs=[-1.0]))
    with open(answers.path, "a") as torn:
        torn.write('{"prompt": "a", "te')
    again = _answers(tmp_path)
    assert again.missing == [(0, 1), (1, 0), (1, 1), (2, 0)]
    with again.writing() as file:
        for place in again.missing:
            again.add(file, place, Completion(tokens=[3], text="y"))
    rows = [json.loads(line) for line in answers.path.read_text().splitlines()]
    assert [(row["row"], row["sample"]) for row in rows] == [
        (row, sample) for row in range(3) for sample in range(2)
    ]
    assert rows[0]["id"] == 1
    assert rows[0]["logprobs"] == [-1.0]
    assert rows[5]["text"] == "ü"
    assert _answers(tmp_path).missing == []
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_answers_to_other_settings(tmp_path: Path) -> None:
    answers = _answers(tmp_path)
    with answers.writing() as file:
        answers.add(file, (0, 0), Completion(tokens=[1], text="x"))
    with pytest.raises(DataError, match="line 1: is no answer to these prompts"):
        _answers(tmp_path, seed=1)


def test_a_file_that_is_something_else(tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text("my notes\nmore\n")
    with pytest.raises(DataError, match="give another --out"):
        _answers(tmp_path)
    assert (tmp_path / "answers.jsonl").read_text() == "my notes\nmore\n"
