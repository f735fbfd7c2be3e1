"""Commands that are given a file with open axes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyper_parallel.cli.main import main

RUN = """\
version: 1
out: {folder}/run
model: {{config: {{model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2,
  num_attention_heads: 1, num_key_value_heads: 1, vocab_size: 512}}}}
data: {{train: {folder}/text.txt, sequence: 32}}
train: {{batch: 2}}
strategy: {{axes: {{replicate: auto, tensor: auto}}, memory: {{recompute: none}}}}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text("some text\n")
    (tmp_path / "run.yaml").write_text(RUN.format(folder=tmp_path))
    return str(tmp_path / "run.yaml")


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str]:
    code: object = 0
    try:
        main(arguments)
    except SystemExit as ended:
        code = ended.code
    return code, capsys.readouterr().err


def test_simulate_plans_for_the_cluster_that_it_is_given(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = told(capsys, "simulate", file, "--cluster", "h100", "--ranks", "2")
    assert not code and "chosen for 2 workers on h100: replicate 2" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["simulate", "FILE", "--cluster", "h100"], "add --ranks N, or name a cluster with its number"),
        (
            ["simulate", "FILE", "--cluster", "h100x2", "--ranks", "4"],
            "has 2 devices, and there are 4 workers",
        ),
        (["inspect", "FILE"], "leaves replicate, tensor_x to the planner"),
        (["verify", "FILE"], "leaves replicate, tensor_x to the planner"),
        (
            ["plan", "--model", "llama-3-8b", "--cluster", "h100x8", "--batch", "8", "--compare", "FILE"],
            "so there is nothing to compare; write the degrees",
        ),
    ],
)
def test_one_line_says_what_is_missing(
    file: str, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = told(capsys, *(file if one == "FILE" else one for one in arguments))
    assert code == 2 and says in said and said.count("\n") == 1
