"""`hyper-parallel generate`, as a person types it: answers, mistakes in the input, and batches that are stopped."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from harness.forked_command import CommandProcess, run_command
from harness.small_folder import save_small_llama
from hyper_parallel.cli.main import main

PROMPTS = [{"prompt": "def f1(x):"}, {"messages": [{"role": "user", "content": "return?"}], "id": "b"}]
MANY = 48
"""Prompts that are still being answered, two at a time, when a signal arrives."""


def generate(
    folder: Path, *arguments: str, largest_file: int = resource.RLIM_INFINITY
) -> subprocess.CompletedProcess[str]:
    return run_command("generate", *arguments, folder=folder, largest_file=largest_file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Transformers model, `model`, and prompts."""
    folder = tmp_path_factory.mktemp("generate")
    save_small_llama(folder)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return folder


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def answered(folder: Path) -> tuple[list[dict[str, Any]], str]:
    """The answers to the file of prompts, and what the command says."""
    files = ["--input", "prompts.jsonl", "--out", "answers.jsonl"]
    done = generate(folder, "model", *files, "inference.max_tokens=20")
    assert done.returncode == 0, done.stderr
    return answers(folder / "answers.jsonl"), done.stderr


def test_a_prompt_and_a_file_have_the_same_answer(
    folder: Path, answered: tuple[list[dict[str, Any]], str]
) -> None:
    printed = generate(folder, "model", "--prompt", "def f1(x):", "inference.max_tokens=20")
    assert printed.returncode == 0, printed.stderr
    assert printed.stderr == ""
    rows, said = answered
    assert rows[0]["text"] + "\n" == printed.stdout
    assert rows[1]["id"] == "b"
    assert len(rows[0]["tokens"]) == 20 or rows[0]["finish"] == "stop"
    assert "2 of 2 answers" in said


@pytest.mark.parametrize("more", [[], ["strategy.axes.tensor=2"]])
def test_a_message_has_the_answer_that_a_file_of_messages_has(
    more: list[str], folder: Path, answered: tuple[list[dict[str, Any]], str]
) -> None:
    printed = generate(folder, "model", "--chat", "return?", "inference.max_tokens=20", *more)
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.removesuffix("\n") == answered[0][1]["text"]


def test_sampling_is_a_function_of_the_seed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    settings = ["inference.temperature=1", "inference.n=3", "inference.max_tokens=12"]
    found = []
    for seed in (1, 1, 2):
        main(["generate", "model", "--prompt", "def", *settings, f"inference.seed={seed}"])
        found.append(capsys.readouterr().out)
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--prompt", "a"], "nowhere: no such folder"),
        (["model", "--prompt", ""], "--prompt is empty"),
        (["model", "--prompt", "a" * 600], "has 512 positions"),
        (["model"], "give --prompt, --chat or --input"),
        (["model", "--input", "prompts.jsonl"], "--input needs --out"),
        (["model", "--input", "prompts.jsonl", "--out", "prompts.jsonl"], "is the input"),
        (["model", "--input", "prompts.jsonl", "--out", "none/a.jsonl"], "no such folder"),
        (["model", "--input", "none.jsonl", "--out", "a.jsonl"], "none.jsonl: no such file"),
        (["model", "--prompt", "a", "inference.max_token=3"], "did you mean 'max_tokens'"),
        (["model", "--prompt", "a", "inference.top_p=2"], "inference.top_p"),
        (["model", "--prompt", "a", "inference.pages=1"], "needs 8 pages of 32 tokens"),
    ],
)
def test_mistakes_are_one_line(
    folder: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main(["generate", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_batch_within_a_byte_budget(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    memory = ["strategy.memory.device=4MiB", "strategy.memory.host=64MiB", "strategy.memory.flash=spill"]
    for name, budget in (("plain", []), ("budget", memory)):
        files = ["--input", "prompts.jsonl", "--out", f"{name}.jsonl"]
        with contextlib.suppress(SystemExit):
            main(["generate", "model", *files, "inference.max_tokens=8", "inference.page=16", *budget])
    said = capsys.readouterr().err
    assert answers(folder / "budget.jsonl") == answers(folder / "plain.jsonl")
    assert "from host (" in said
    assert "strategy.memory.flash: no byte was moved there" in said
    assert not list((folder / "spill").iterdir())


def test_a_prompt_of_a_file_that_is_too_long_names_its_line(folder: Path) -> None:
    (folder / "long.jsonl").write_text('{"prompt": "a"}\n\n' + json.dumps({"prompt": "a" * 600}) + "\n")
    done = generate(folder, "model", "--input", "long.jsonl", "--out", "long-answers.jsonl")
    assert done.returncode == 2
    assert "line 3 of the prompts" in done.stderr
    assert not (folder / "long-answers.jsonl").exists()


@pytest.fixture(scope="module")
def many(folder: Path) -> tuple[Path, str]:
    """A file of prompts, and the answers to it, in batches of the default size."""
    prompts, out = folder / "many.jsonl", folder / "many-answers.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"def f{i}(x):"}) + "\n" for i in range(MANY)))
    done = generate(folder, "model", "--input", prompts.name, "--out", out.name, "inference.max_tokens=100")
    assert done.returncode == 0, done.stderr
    return prompts, out.read_text()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_batch_that_is_stopped_goes_on(folder: Path, many: tuple[Path, str], how: signal.Signals) -> None:
    prompts, whole = many
    out = folder / f"{how.name}-answers.jsonl"
    files = ["--input", str(prompts), "--out", str(out)]
    arguments = ["model", *files, "inference.batch=2", "inference.max_tokens=100"]
    with CommandProcess(["generate", *arguments], folder) as worker:
        end = time.monotonic() + 120
        while not (out.exists() and out.read_text().count("\n") >= 3):
            assert worker.poll() is None, worker.output()
            assert time.monotonic() < end
            time.sleep(0.01)
        worker.send_signal(how)
        code = worker.wait(60)
    assert code == (-how if how == signal.SIGKILL else 130)
    assert "Traceback" not in worker.output()[1]
    kept = out.read_text().count("\n")
    assert 3 <= kept < MANY
    done = generate(folder, *arguments)
    assert done.returncode == 0, done.stderr
    assert f"{kept} answers are there; going on with {MANY - kept}" in done.stderr
    assert [row["row"] for row in answers(out)] == list(range(MANY))
    assert out.read_text() == whole


def test_answers_of_another_model_are_not_gone_on_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same path with other weights, as after more training."""
    monkeypatch.chdir(folder)
    shutil.copytree("model", "trained")
    given = [
        "generate",
        "trained",
        "--input",
        "prompts.jsonl",
        "--out",
        "trained.jsonl",
        "inference.max_tokens=4",
    ]
    main(given)
    main(given)
    os.utime(folder / "trained" / "model.safetensors", (1, 1))
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == 2
    assert "no answer to these prompts with this model" in capsys.readouterr().err


def test_a_full_disk_keeps_what_was_answered(folder: Path) -> None:
    arguments = [
        "model",
        "--input",
        "prompts.jsonl",
        "--out",
        "full.jsonl",
        "inference.n=20",
        "inference.max_tokens=9",
    ]
    done = generate(folder, *arguments, largest_file=2000)
    assert done.returncode == 1
    assert "finished answers are kept" in done.stderr
    assert "Traceback" not in done.stderr
    done = generate(folder, *arguments)
    assert done.returncode == 0, done.stderr
    assert "answers are there" in done.stderr
    assert len(answers(folder / "full.jsonl")) == 40
