"""`hyper-parallel examples` copies what the documents' commands name, and overwrites nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyper_parallel.cli.examples import _headline
from hyper_parallel.cli.main import main

ROOT = Path(__file__).parents[2] / "examples"


def run(*arguments: str) -> int:
    """The exit code of the command."""
    try:
        main(["examples", *arguments])
    except SystemExit as ended:
        return int(str(ended.code))
    return 0


def test_all_files_are_copied_and_listed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run() == 0
    said = capsys.readouterr().out
    assert (tmp_path / "examples/quickstart.yaml").read_bytes() == (ROOT / "quickstart.yaml").read_bytes()
    assert (tmp_path / "examples/rl/grpo-sort.yaml").is_file()
    assert "examples/rl/grpo-sort.yaml\n    A policy that learns to sort" in said
    assert max(map(len, said.splitlines())) <= 80
    assert said.endswith("next:    hyper-parallel train examples/quickstart.yaml\n")
    assert run() == 0, "the same files again"


def test_a_changed_file_is_not_overwritten_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "examples/quickstart.yaml"
    mine.parent.mkdir()
    mine.write_text("version: 1\n")
    assert run() == 2
    assert "examples/quickstart.yaml exists with other content" in capsys.readouterr().err
    assert [file.name for file in mine.parent.iterdir()] == ["quickstart.yaml"]
    assert mine.read_text() == "version: 1\n"
    assert run("mine") == 0, "the advice"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run(str(tmp_path / "file")) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_list_copies_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("--list") == 0
    assert "quickstart.yaml\n    A 5.5-million-parameter Llama" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "text", "headline"),
    [
        ("a.yaml", "# Llama 3.1 on 8.\n#   a command\nversion: 1\n", "Llama 3.1 on 8."),
        ("a.yaml", "# Two lines of\n# one sentence. Another.\n", "Two lines of one sentence."),
        ("a.sh", "#!/bin/sh\n# Starts it.\n", "Starts it."),
        ("a.py", '"""A loop\nof one. More.\n\ncommand\n"""\n', "A loop of one."),
        ("a.jsonl", '{"a": 1}\n', ""),
    ],
)  # fmt: skip
def test_the_headline_is_the_first_sentence(tmp_path, name, text, headline):
    path = tmp_path / name
    path.write_text(text)
    assert _headline(path) == headline
