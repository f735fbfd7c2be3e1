"""Prompts that a model cannot answer are found before the first step, by file and line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import chat_model
from hyper_parallel.data import Tokenizer
from hyper_parallel.errors import DataError
from hyper_parallel.rl.controller.prompts import PromptLengths, fitting
from hyper_parallel.rl.tasks import read_tasks

MODEL = SimpleNamespace(max_position_embeddings=32)


def _read(path: Path, overlong: Any, *prompts: Any) -> tuple[list[dict[str, Any]], PromptLengths]:
    path.write_text("\n\n".join(json.dumps({"prompt": one}) for one in prompts))
    lengths = PromptLengths(Tokenizer(chat_model.tokenizer()), MODEL, 8, overlong)
    return read_tasks(path, lengths.accept), lengths


def test_a_prompt_that_is_too_long_is_named_left_out_or_cut(tmp_path: Path) -> None:
    path, long = tmp_path / "prompts.jsonl", "Blue, " * 30
    with pytest.raises(
        DataError, match=r"prompts.jsonl:3: the prompt has \d+ tokens, and the model's 32 positions"
    ):
        _read(path, "error", "Blue", long)
    rows, lengths = _read(path, "drop", "Blue", long, [{"role": "user", "content": long}])
    assert [row["prompt"] for row in rows] == ["Blue"] and lengths.dropped == 2
    rows, lengths = _read(path, "truncate_left", "Blue", long)
    assert len(rows) == 2 and lengths.dropped == 0
    assert fitting(list(range(40)), MODEL, 8, "truncate_left") == list(range(16, 40))
    with pytest.raises(DataError, match="leave 0 beside"):
        fitting([1], MODEL, 32, "truncate_left")


def test_an_empty_prompt_is_an_error_also_where_long_ones_are_left_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"prompts.jsonl:3: the prompt is empty"):
        _read(tmp_path / "prompts.jsonl", "drop", "Blue", "")
