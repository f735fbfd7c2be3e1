"""``hyper-parallel plan``: questions are answered, and each mistake is told in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hyper_parallel import config
from hyper_parallel.cli.main import main

ASK = [
    "plan",
    "--model",
    "llama-3.2-1b",
    "--cluster",
    "h100x8",
    "--batch",
    "16",
    "--sequence",
    "2k",
    "--simulate",
    "0",
]


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = 0
    try:
        main(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    told = capsys.readouterr()
    return code, told.out, told.err


def test_it_answers_and_writes_what_loads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, html = tmp_path / "run.yaml", tmp_path / "plan.html"
    code, told, _ = _run(
        capsys, *ASK, "--runnable", "--top", "3", "--json", "--out", str(out), "--html", str(html)
    )
    assert code == 0
    found = json.loads(told)
    assert len(found["best"]) <= 3
    best = found["best"][0]["strategy"]
    run = config.load(out)
    assert run.strategy.axes.world == 8
    assert run.strategy.axes.shard == best["shard"]
    assert html.read_text().startswith("<!doctype html>")


def test_a_folder_of_transformers_is_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fields = {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    out = tmp_path / "run.yaml"
    arguments = ["plan", "--model", str(tmp_path), *ASK[3:], "--runnable", "--out", str(out), "--json"]
    code, told, error = _run(capsys, *arguments)
    assert code == 0, error
    assert json.loads(told)["parameters"] > 10**8
    assert config.load(out).model.config == fields


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"--model": "lama-3.2-1b"}, "did you mean 'llama-3.2-1b'"),
        ({"--model": "./nowhere"}, "nowhere does not exist; give a Transformers config"),
        ({"--cluster": "h10x8"}, "did you mean 'h100'"),
        ({"--cluster": "h100"}, "open number of devices"),
        ({"--batch": "0"}, "--batch: '0' is no whole number"),
        ({"--batch": "many"}, "--batch: 'many' is no whole number"),
        ({"--sequence": "1e99"}, "--sequence: '1e99'"),
        ({"--sequence": "99999M"}, "sequence must be 1 to"),
        ({"--precision": "bf61"}, "did you mean 'bf16'"),
        ({"--objective": "tme"}, "did you mean 'time'"),
        ({"--fix": "tensor_z=8"}, "nothing of a strategy is named 'tensor_z'"),
        ({"--fix": "tensor_x=0"}, "tensor_x is 1 to"),
        ({"--devices": "16"}, "h100x8 has 8"),
        ({"--framework": "megatron"}, "there is no framework profile"),
        ({"--tokens": "lots"}, "--tokens: 'lots'"),
        ({"--out": "nowhere/run.yaml"}, "nowhere does not exist; create it first"),
        ({"--model": "llama-3-405b"}, "what would make it fit"),
    ],
)
def test_a_mistake_is_one_line(change: dict[str, str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*ASK, "--runnable"]
    for option, value in change.items():
        if option in arguments:
            arguments[arguments.index(option) + 1] = value
        else:
            arguments += [option, value]
    code, out, error = _run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert error.startswith("hyper-parallel: error: ")
    assert told in error
    assert error.count("\n") == 1


def test_options_that_do_not_go_together_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(capsys, "plan", "--model", "llama-3-8b")[0] == 2
    assert _run(capsys, *ASK[:4], "h100", *ASK[5:], "--fit", "--devices", "8..16")[0] == 2
    assert _run(capsys, *ASK, "--fit", "--out", "run.yaml")[0] == 2


def test_a_row_that_is_malformed_is_unsupported_and_the_others_stand(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from planner.published_run import RUN

    file = tmp_path / "runs.csv"
    rows = [RUN, {**RUN, "tp": "x"}]
    lines = [",".join(RUN), *(",".join(str(cell) for cell in row.values()) for row in rows)]
    file.write_text("\n".join(lines) + "\n")
    code, told, _ = _run(capsys, "plan", "--evaluate", str(file), "--json")
    found = json.loads(told)
    assert code == 0
    assert len(found) == 2
    assert found[0]["step_time_s"] > 0
    assert "tp" in found[1]["unsupported"]


@pytest.mark.parametrize(
    ("arguments", "first", "said"),
    [
        ([], "estimated: run llama-3.2-1b on h100x8 with ", "a step; it fits."),
        (["--devices", "7"], "estimated: run llama-3.2-1b on 7 devices of h100x8 with ", "--batch 14 or 21 would"),
        (["--devices", "4..8"], "estimated: llama-3.2-1b, ", "how the step scales"),
        (["--sequence", "2k..4k"], "estimated: 4,096 tokens fit", "how long sequences can be"),
        (["--cluster", "h100", "--fit"], "estimated: llama-3.2-1b fits on 1 device of h100", "the fewest devices"),
    ],
)  # fmt: skip
def test_a_short_answer_leads_with_its_sentence_within_80_columns(
    capsys: pytest.CaptureFixture[str], arguments: list[str], first: str, said: str
) -> None:
    code, told, _ = _run(capsys, *ASK, *arguments)
    assert code == 0 and told.startswith(first)
    assert said in " ".join(told.split())
    assert max(map(len, told.splitlines())) <= 80 and len(told.splitlines()) <= 16
    code, more, _ = _run(capsys, *ASK, *arguments, "--details")
    assert code == 0 and len(more.splitlines()) > len(told.splitlines()) - 6


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"--model": "llama-3.2-1bb"},
            "did you mean 'llama-3.2-1b'? Or give the folder of a Transformers model",
        ),
        ({"--cluster": "h10x8"}, "did you mean 'h100'?"),
        ({"--cluster": "h100"}, "name it with one, as in h100x2048, or give devices"),
        ({"--batch": "32x"}, "is no whole number of at least 1"),
        ({"--fix": "tensr=2"}, "did you mean 'tensor'?"),
    ],
)
def test_a_mistake_is_one_line_with_its_mend(
    capsys: pytest.CaptureFixture[str], change: dict[str, str], said: str
) -> None:
    given = dict(zip(ASK[1::2], ASK[2::2], strict=True)) | change
    code, told, error = _run(capsys, "plan", *(word for pair in given.items() for word in pair))
    assert code == 2 and told == ""
    assert len(error.splitlines()) == 1 and said in error


def test_details_and_generation_come_after_the_short_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, told, _ = _run(capsys, *ASK, "--details")
    assert code == 0 and told.startswith("estimated: run ")
    assert "where the step goes" in told and "left out at this width" in told
    assert max(map(len, told.splitlines())) <= 80
    ask = ["plan", "--generate", "--model", "llama-3.2-1b", "--cluster", "h100x1", "--batch", "4"]
    code, told, _ = _run(capsys, *ask)
    assert code == 0 and told.startswith("estimated: llama-3.2-1b on 1 × h100x1 generates ")
    assert max(map(len, told.splitlines())) <= 80 and len(told.splitlines()) <= 10
    code, told, _ = _run(capsys, *ask, "--details")
    assert code == 0 and "plans" in told and max(map(len, told.splitlines())) <= 80
