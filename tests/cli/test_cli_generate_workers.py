"""`hyper-parallel generate` on several workers: the tokens of one device, and faults in mid-run.

The command runs in this process, whose fork server is started once; its workers are processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.commands import descendants, running
from harness.small_folder import save_small_llama
from hyper_parallel.cli.main import main

LENGTH = "inference.max_tokens=24"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Transformers model, `model`, prompts, and one device's answers to them."""
    folder = tmp_path_factory.mktemp("workers")
    save_small_llama(folder, scale=3)
    rows = [{"prompt": f"def f{i}(x):" * (1 + i % 5)} for i in range(24)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with contextlib.chdir(folder):
        main_generate("one.jsonl")
    return folder


def main_generate(out: str, *overrides: str) -> int:
    """The command's exit code, its batch written to `out`."""
    given = ["generate", "model", "--input", "prompts.jsonl", "--out", out, LENGTH, *overrides]
    try:
        main(given)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder as the working folder, with a folder for temporary files that is empty."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return folder


def leftovers(temporary: Path) -> list[str]:
    return sorted(path.name for path in temporary.iterdir())


@pytest.mark.parametrize("axes", ["{tensor: 2}", "{replicate: 2}", "{replicate: 2, shard: 2}"])
def test_answers_are_those_of_one_device(here: Path, tmp_path: Path, axes: str) -> None:
    out = f"{axes.replace(' ', '')}.jsonl"
    assert main_generate(out, f"strategy.axes={axes}") == 0
    assert (here / out).read_text() == (here / "one.jsonl").read_text()
    assert leftovers(tmp_path) == []


def test_settings_come_from_a_file_and_the_answer_to_a_prompt_is_printed(
    here: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "generate.yaml").write_text(
        "version: 1\nstrategy: {axes: {tensor: 2}}\ninference: {max_tokens: 5}\n"
    )
    printed = []
    for more in (["--config", "generate.yaml"], ["inference.max_tokens=5"]):
        main(["generate", "model", "--prompt", "def f1(x):", "inference.n=2", *more])
        printed.append(capfd.readouterr().out)
    assert printed[0] == printed[1] != ""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["strategy.axes={pipeline: 2}"], "'axes.pipeline' (2): generation does not run pipelines"),
        (["strategy=auto"], "write the degrees of the axes"),
        (["strategy.axes={tensor: 2}", "strategy.sequence=true"], "'sequence' is for training"),
        (["strategy.memory.recompute=layer"], "'memory.recompute' is for training"),
        (["strategy.overlap.schedule=none"], "section 'overlap' is for training"),
        (["strategy.precision.param=bfloat16"], "the dtype of the model's folder"),
        (["strategy.axes={tensor: 2}", "launch.workers=3"], "but 'launch.workers' is 3"),
        (["strategy.axes={tensor: 3}"], "3"),
        (["strategy.axes={expert: 2, tensor: 2}"], "expert"),
    ],
)
def test_mistakes_are_one_line(
    here: Path, tmp_path: Path, overrides: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main_generate("none.jsonl", *overrides) == 2
    said = capfd.readouterr().err.strip()
    assert message in said
    assert said.count("\n") == 0 and said.startswith("hyper-parallel: error: ")
    assert not (here / "none.jsonl").exists()
    assert leftovers(tmp_path) == []


@contextlib.contextmanager
def once(ready: Callable[[], bool], act: Callable[[], None]) -> Iterator[None]:
    """Do something in another thread as soon as a condition holds."""

    def wait() -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if ready():
                act()
                return
            time.sleep(0.01)

    thread = threading.Thread(target=wait)
    thread.start()
    yield
    thread.join()


def workers() -> list[int]:
    """Processes of the workers: children of the fork server."""
    children = {
        pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        for pid in descendants(os.getpid())
    }
    return sorted(pid for pid, parent in children.items() if int(parent) != os.getpid())


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ("kill", 1, "worker 1 was killed by SIGKILL"),
        ("stop", 1, "worker 1"),
        ("interrupt", 130, "finished answers are kept"),
    ],
)
def test_a_fault_ends_the_command_and_the_batch_goes_on(
    here: Path, tmp_path: Path, fault: str, code: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    out = here / f"{fault}.jsonl"
    found: list[int] = []

    def act() -> None:
        found[:] = workers()
        if fault == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        else:
            os.kill(found[1], signal.SIGKILL if fault == "kill" else signal.SIGSTOP)

    given = ["strategy.axes={tensor: 2}", "inference.batch=2"]
    with once(lambda: out.exists() and out.read_text().count("\n") >= 3, act):
        assert main_generate(out.name, *given, "launch.timeout=2") == code
    said = capfd.readouterr().err
    assert len(found) == 2 and not any(map(running, found))
    assert message in said and "Traceback" not in said
    assert leftovers(tmp_path) == []
    done = out.read_text().count("\n")
    assert 3 <= done < 24
    assert main_generate(out.name, *given) == 0
    assert f"{done} answers are there; going on with {24 - done}" in capfd.readouterr().err
    assert out.read_text() == (here / "one.jsonl").read_text()
