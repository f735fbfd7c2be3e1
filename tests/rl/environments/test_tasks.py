"""Synthetic tasks follow from seed, split and index; task files are read with errors by line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.errors import ConfigError, DataError
from hyper_parallel.rl.rewards.answer_match import exact_match
from hyper_parallel.rl.tasks import NAMES, VOCABULARY, read_tasks, tasks

SPLITS = st.sampled_from(["train", "held_out"])


@given(st.sampled_from(NAMES), st.integers(0, 100), SPLITS, st.integers(0, 50), st.integers(2, 12))
def test_answers_are_right_and_rows_depend_on_their_index_only(
    name: str, seed: int, split: str, first: int, digits: int
) -> None:
    rows = tasks(name, seed, split, 4, digits=digits, first=first)  # type: ignore[arg-type]
    assert rows == tasks(name, seed, split, first + 4, digits=digits)[first:]  # type: ignore[arg-type]
    for row in rows:
        given_digits = row["prompt"].removesuffix("=")
        assert len(given_digits) == digits
        assert row["answer"] == "".join(sorted(given_digits, reverse=name == "descend"))
        assert row["demonstration"] in (row["answer"], row["answer"][::-1])
        assert set(row["prompt"] + row["answer"]) <= set(VOCABULARY)
        assert exact_match(row["prompt"], row["answer"], row) == 1.0


def test_splits_are_disjoint_for_all_seeds() -> None:
    train, held_out = (
        {row["prompt"] for seed in range(3) for row in tasks("sort", seed, split, 2000)}
        for split in ("train", "held_out")
    )
    assert not train & held_out
    assert len(train) > 5500
    assert len(held_out) > 4000


def test_demonstrations_of_descend_mostly_ascend() -> None:
    rows = tasks("descend", 0, "train", 2000)
    share = sum(row["demonstration"] != row["answer"] for row in rows) / len(rows)
    assert 0.66 < share < 0.74
    assert all(row["demonstration"] == row["answer"] for row in tasks("sort", 0, "train", 100))


def test_seeds_differ() -> None:
    assert tasks("sort", 0, "train", 20) != tasks("sort", 1, "train", 20)


def test_wrong_arguments() -> None:
    with pytest.raises(ConfigError, match="did you mean 'sort'"):
        tasks("sorts", 0, "train", 1)
    with pytest.raises(ConfigError, match="unknown split"):
        tasks("sort", 0, "test", 1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="2 to 64"):
        tasks("sort", 0, "train", 1, digits=1)


def test_a_task_file(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "answer": "1"},
        {"prompt": [{"role": "user", "content": "b"}], "tests": ["assert True"]},
    ]
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert read_tasks(path) == rows


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": ', "tasks.jsonl:2: not JSON"),
        ('{"prompt": "a"}\n\n[1]', "tasks.jsonl:3: it is list"),
        ('{"prompt": 3}', "tasks.jsonl:1: the row's prompt is 3"),
        ("\n", "tasks.jsonl: it has no rows"),
        ('{"prompt": "' + "[" * 100 + '"}\n' + "[" * 100, "tasks.jsonl:2: not JSON"),
    ],
)
def test_errors_name_file_and_line(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=message) as error:
        read_tasks(path)
    assert "\n" not in str(error.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_tasks(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="it is a folder"):
        read_tasks(tmp_path)
