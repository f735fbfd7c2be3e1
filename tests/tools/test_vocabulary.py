"""The check of names and first lines finds private words, and leaves the field's terms alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "check_vocabulary.py"


def check(folder: Path, file: str, code: str) -> subprocess.CompletedProcess[str]:
    (folder / file).write_text(code)
    return subprocess.run(
        [sys.executable, str(TOOL), str(folder)], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("file", "code", "said"),
    [
        ("told.py", "", "the file's name has 'told'"),
        ("a.py", '"""The way in which ranks are asked."""\n', "the first line has 'The way'"),
        ("a.py", '"""What a rank holds."""\n', "the first line has 'What'"),
        ("a.md", "A rank is told.\n", "a.md:1: the text has 'is told'"),
        ("a.py", "class KeptRows: ...\n", "KeptRows has 'kept'"),
        ("a.py", "def settle_rules() -> None: ...\n", "settle_rules has 'settle'"),
    ],
)
def test_a_private_word_is_refused(tmp_path: Path, file: str, code: str, said: str) -> None:
    done = check(tmp_path, file, code)
    assert done.returncode == 1
    assert said in done.stdout


def test_terms_of_the_field_pass(tmp_path: Path) -> None:
    code = '"""Liveness analysis: the lifetime of each storage."""\nclass Buffer: ...\ndef _kept() -> None: ...\n'
    assert check(tmp_path, "liveness.py", code).returncode == 0


def test_quoted_output_and_code_in_documents_pass(tmp_path: Path) -> None:
    text = "A page.\n\n    so many rows\n\n```\nso many rows\n```\n"
    assert check(tmp_path, "page.md", text).returncode == 0
