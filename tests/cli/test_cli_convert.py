"""``hyper-parallel convert`` prints a fragment, or writes it to a new file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hyper_parallel.cli.convert import convert
from hyper_parallel.config import yaml12
from hyper_parallel.errors import ConfigError


def test_it_prints_the_fragment_and_what_is_left(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, "train_batch_size": 16, "x": 1}))
    done = CliRunner().invoke(convert, [str(file), "--devices", "4"], catch_exceptions=False)
    assert done.exit_code == 0
    content = yaml12.parse(done.output, "output")
    assert content["strategy"] == {"axes": {"shard": 4}, "memory": {"shard": "gradients"}}
    assert content["train"] == {"batch": 16, "clip": None}
    assert "# Not converted (1):\n#   x = 1: unknown key" in done.output


def test_it_writes_a_new_file_only(tmp_path: Path) -> None:
    file, out = tmp_path / "ds.json", tmp_path / "base.yaml"
    file.write_text("{}")
    done = CliRunner().invoke(convert, [str(file), "--out", str(out)], catch_exceptions=False)
    assert done.output.startswith(f"{out}: 2 keys; 0 keys of {file}")
    assert yaml12.parse(out.read_text(), "out")["strategy"] == {"axes": {"replicate": "auto"}}
    with pytest.raises(ConfigError, match="exists"):
        CliRunner().invoke(convert, [str(file), "--out", str(out)], catch_exceptions=False)


@pytest.mark.parametrize("text", ["60 apples", "0"])
def test_bytes_that_are_none_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("{}")
    with pytest.raises(ConfigError, match="--device-memory"):
        CliRunner().invoke(
            convert, [str(tmp_path / "ds.json"), "--device-memory", text], catch_exceptions=False
        )
