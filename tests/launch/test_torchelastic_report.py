"""What torchrun's report says of a run that was refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from hyper_parallel.launch.external_launcher import report_reason


def test_torchrun_reads_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    report_reason("'train.batch' (8) must be a multiple of 3")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    assert failure.message["message"] == "'train.batch' (8) must be a multiple of 3"  # type: ignore[index]
    assert failure.timestamp > 0


def test_nothing_is_written_without_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    report_reason("a mistake")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("launched", "code"), [(True, 0), (False, -signal.SIGTERM)])
def test_a_worker_that_waits_leaves_quietly(launched: bool, code: int) -> None:
    program = (
        "from hyper_parallel.launch.external_launcher import let_speak; import os, signal, threading\n"
        "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        "let_speak()"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TORCHELASTIC_RUN_ID"}
    if launched:
        environment["TORCHELASTIC_RUN_ID"] = "none"
    assert subprocess.run([sys.executable, "-c", program], env=environment, timeout=30).returncode == code
