"""The files of a run that the controller writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.rl_runs import rl_config
from hyper_parallel.errors import CheckpointError
from hyper_parallel.rl.controller.recorder import SAMPLES, Recorder


def test_a_pipe_in_the_place_of_samples_is_one_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SAMPLES)
    recorder = Recorder(rl_config(tmp_path), lambda line: None)
    with pytest.raises(CheckpointError, match=r"cannot read .*samples.jsonl: it is a pipe"):
        recorder.open(1)
    recorder.close()


def test_samples_that_are_no_records_are_skipped(tmp_path: Path) -> None:
    (tmp_path / SAMPLES).write_bytes(b'{"step": 1}\n\xff\xfe\n7\n{"step": 2}\n{"st')
    recorder = Recorder(rl_config(tmp_path), lambda line: None)
    recorder.open(1)
    recorder.close()
    assert (tmp_path / SAMPLES).read_bytes() == b'{"step": 1}\n'
