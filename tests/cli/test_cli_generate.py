"""`hyper-parallel generate`, as a person types it: answers, mistakes in the input, and batches that are stopped."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from harness.small_folder import save_small_llama
from hyper_parallel.cli.main import main

PROMPTS = [{"prompt": "def f1(x):"}, {"messages": [{"role": "user", "content": "return?"}], "id": "b"}]


def command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "hyper_parallel", "generate", *arguments]


def generate(
    folder: Path, *arguments: str, largest_file: int = resource.RLIM_INFINITY
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, *arguments),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file)),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Transformers model, `model`, and prompts."""
    folder = tmp_path_factory.mktemp("generate")
    save_small_llama(folder)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return folder


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_prompt_and_a_file_have_the_same_answer(folder: Path) -> None:
    printed = generate(folder, "model", "--prompt", "def f1(x):", "inference.max_tokens=20")
    assert printed.returncode == 0, printed.stderr
    assert printed.stderr == ""
    done = generate(
        folder, "model", "--input", "prompts.jsonl", "--out", "same.jsonl", "inference.max_tokens=20"
    )
    assert done.returncode == 0, done.stderr
    rows = answers(folder / "same.jsonl")
    assert rows[0]["text"] + "\n" == printed.stdout
    assert rows[1]["id"] == "b"
    assert len(rows[0]["tokens"]) == 20 or rows[0]["finish"] == "stop"
    assert "2 of 2 answers" in done.stderr


def test_a_message_has_the_answer_that_a_file_of_messages_has(folder: Path) -> None:
    done = generate(
        folder, "model", "--input", "prompts.jsonl", "--out", "chat.jsonl", "inference.max_tokens=9"
    )
    assert done.returncode == 0, done.stderr
    said = [answers(folder / "chat.jsonl")[1]["text"]]
    for more in ([], ["strategy.axes.tensor=2"]):
        printed = generate(folder, "model", "--chat", "return?", "inference.max_tokens=9", *more)
        assert printed.returncode == 0, printed.stderr
        said.append(printed.stdout.removesuffix("\n"))
    assert said[0] == said[1] == said[2]


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


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_batch_that_is_stopped_goes_on(folder: Path, how: signal.Signals) -> None:
    prompts, out = folder / f"{how.name}.jsonl", folder / f"{how.name}-answers.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"def f{i}(x):"}) + "\n" for i in range(40)))
    arguments = [
        "model",
        "--input",
        str(prompts),
        "--out",
        str(out),
        "inference.batch=2",
        "inference.max_tokens=100",
    ]
    worker = subprocess.Popen(
        command(folder, *arguments),
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        # A suite that a shell runs in the background ignores it, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    end = time.monotonic() + 120
    while not (out.exists() and out.read_text().count("\n") >= 3):
        assert worker.poll() is None, worker.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.01)
    worker.send_signal(how)
    said = worker.communicate(timeout=60)[1]
    assert worker.returncode == (-how if how == signal.SIGKILL else 130)
    assert "Traceback" not in said
    kept = out.read_text().count("\n")
    assert 3 <= kept < 40
    done = generate(folder, *arguments)
    assert done.returncode == 0, done.stderr
    assert f"{kept} answers are there; going on with {40 - kept}" in done.stderr
    assert [row["row"] for row in answers(out)] == list(range(40))
    # In batches of another size.
    whole = generate(folder, *arguments[:3], "--out", str(out.with_suffix(".whole")), *arguments[6:])
    assert whole.returncode == 0, whole.stderr
    assert out.with_suffix(".whole").read_text() == out.read_text()


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
