"""A run file that was made to hurt ends in a line for each mistake, soon, and tells nothing of other files."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.hostile import attempts
from harness.hostile import runs as hostile_runs
from hyper_parallel.config import load, yaml12
from hyper_parallel.config.validation_errors import MOST_LINES
from hyper_parallel.errors import ConfigError

HARMLESS = {
    "a family that leads up",
    "a pattern of files without an end",
    "a thousand fields that no config has",
}
"""What is only refused where the model is built, or means nothing bad."""


def test_every_hostile_file_is_refused(tmp_path: Path) -> None:
    found = list(attempts.runs(1, len(hostile_runs.CASES) + 10, tmp_path))
    assert len(hostile_runs.CASES) > 90
    bad = [o for o in found if o.verdict != ("harmless" if o.name in HARMLESS else "refused")]
    assert [o for o in bad if o.name in hostile_runs.CASES or o.verdict not in attempts.GOOD] == []


def test_many_mistakes_are_cut_with_a_count(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(hostile_runs.GOOD + "".join(f"train{i}: 1\n" for i in range(300)))
    with pytest.raises(ConfigError) as refused:
        load(path)
    lines = str(refused.value).splitlines()
    assert len(lines) == MOST_LINES + 1
    assert lines[0].endswith("train0: unknown key; did you mean 'train'?")
    assert lines[-1].endswith(f"and {300 - MOST_LINES} more problems")


def test_aliases_up_to_the_bound_are_read() -> None:
    text = "a: &a {x: 1, y: [2, 3]}\nb: {<<: *a, z: *a}\n" + "c: [" + "*a, " * 1000 + "*a]\n"
    found = yaml12.parse(text, "run.yaml")
    assert found["b"] == {"x": 1, "y": [2, 3], "z": {"x": 1, "y": [2, 3]}}
    assert len(found["c"]) == 1001
    for many in (text + "d: [" + "*a, " * 4000 + "*a]\n", "[" + "0," * yaml12.MOST_VALUES + "0]"):
        with pytest.raises(ConfigError, match=f"more than {yaml12.MOST_VALUES} keys and values"):
            yaml12.parse(many, "run.yaml")


def test_a_file_that_is_built_on_is_not_quoted(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("extends: secret.txt\n")
    for secret in (
        "hunter2: [",
        "hunter2: 1\nhunter2: 2\n",
        "a: *hunter2\n",
        "a: !hunter2 x\n",
        "hunter2: 1\n",
        "hunter2",
    ):
        (tmp_path / "secret.txt").write_text(secret)
        with pytest.raises(ConfigError) as refused:
            load(path)
        (line,) = str(refused.value).splitlines()
        assert "hunter2" not in line and "secret.txt" in line


def test_what_a_shell_hands_over_is_read(tmp_path: Path) -> None:
    import os

    read, write = os.pipe()
    os.write(write, hostile_runs.GOOD.encode())
    os.close(write)
    assert load(f"/dev/fd/{read}").out == "out"
    os.close(read)
