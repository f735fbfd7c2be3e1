"""Kills and Ctrl-C: who is told, what is left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from harness.commands import Command, descendants, make_config, noted, running, wait_until
from hyper_parallel.config import RunConfig


def _started(folder: Path, config: RunConfig, target: str, **how: bool) -> Command:
    command = Command(config, target, **how)
    world = config.effective_strategy.axes.world
    wait_until(
        lambda: (
            command.process.poll() is not None
            or all((folder / f"run/rank-{rank}.json").exists() for rank in range(world))
        ),
        "every worker is at work",
        timeout=200,
    )
    assert command.process.poll() is None, command.errors
    return command


def test_a_killed_worker_ends_the_run_names_the_rank_and_leaves_nothing(tmp_path: Path) -> None:
    command = _started(tmp_path, make_config(tmp_path, {"shard": 4}), "loops")
    family = descendants(command.process.pid)
    os.kill(noted(tmp_path, 2)["pid"], signal.SIGKILL)
    assert command.end(timeout=15) == 1
    assert command.errors.startswith(
        "hyper-parallel: error: worker 2 was killed by SIGKILL (out of memory, or by hand)"
    )
    assert "continues from the last committed checkpoint" in command.errors
    assert command.errors.count("\n") == 1
    wait_until(lambda: not any(map(running, family)), "no process is left", timeout=10)


def test_a_killed_worker_ends_those_that_hear_of_nothing(tmp_path: Path) -> None:
    command = _started(tmp_path, make_config(tmp_path, {"shard": 2}), "ignores_stop")
    os.kill(noted(tmp_path, 0)["pid"], signal.SIGKILL)
    assert command.end(timeout=15) == 1
    assert "worker 0 was killed by SIGKILL" in command.errors
    wait_until(lambda: not running(noted(tmp_path, 1)["pid"]), "the other worker is gone", timeout=10)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_asked_to_stop_the_workers_finish_and_nothing_is_left(tmp_path: Path, number: signal.Signals) -> None:
    imports = number == signal.SIGINT
    command = _started(tmp_path, make_config(tmp_path, {"shard": 2}), "loops", imports=imports)
    family = descendants(command.process.pid)
    # The whole process group, as a terminal's Ctrl-C does: workers must not be ended by it.
    os.killpg(command.process.pid, number)
    assert command.end(timeout=30) == 130
    assert [noted(tmp_path, rank)["stopped"] for rank in range(2)] == [True, True]
    assert command.errors == "stopping: the workers finish their step and save; once more ends them at once\n"
    wait_until(lambda: not any(map(running, family)), "no process is left", timeout=10)


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    command = _started(tmp_path, make_config(tmp_path, {"shard": 2}), "ignores_stop")
    family = descendants(command.process.pid)
    os.kill(command.process.pid, signal.SIGINT)
    wait_until(lambda: "stopping" in command.errors, "the first is heard")
    time.sleep(0.5)  # what comes sooner is the first one by another way
    assert command.process.poll() is None
    os.kill(command.process.pid, signal.SIGINT)
    assert command.end(timeout=15) == 130
    wait_until(lambda: not any(map(running, family)), "no process is left", timeout=10)


def test_ctrl_c_before_the_workers_are_there_ends_at_once(tmp_path: Path) -> None:
    command = Command(make_config(tmp_path, {"shard": 2}), "ignores_stop", imports=True)
    wait_until(lambda: bool(descendants(command.process.pid)), "the fork server is there")
    time.sleep(0.3)  # torch is being imported
    family = descendants(command.process.pid)
    os.kill(command.process.pid, signal.SIGINT)
    assert command.end(timeout=15) == 130
    wait_until(lambda: not any(map(running, family)), "no process is left", timeout=10)


def test_when_the_command_is_killed_no_process_is_left(tmp_path: Path) -> None:
    command = _started(tmp_path, make_config(tmp_path, {"shard": 2}), "ignores_stop")
    family = descendants(command.process.pid)
    assert len(family) >= 3, "the fork server and two workers"
    command.process.kill()
    wait_until(lambda: not any(map(running, family)), "no process is left", timeout=10)


def test_when_the_fork_server_is_killed_the_run_ends_and_no_process_is_left(tmp_path: Path) -> None:
    command = _started(tmp_path, make_config(tmp_path, {"shard": 2}), "ignores_stop")
    family = descendants(command.process.pid)
    workers = {noted(tmp_path, rank)["pid"] for rank in range(2)}
    (server,) = family - workers
    os.kill(server, signal.SIGKILL)
    assert command.end(timeout=15) == 1
    assert "the process that holds the workers was killed by SIGKILL" in command.errors
    wait_until(lambda: not any(map(running, family)), "no process is left", timeout=10)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_leaves_the_terminal_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    command = _started(tmp_path, make_config(tmp_path, {"shard": 2}), "draws", terminal=True)
    os.kill(noted(tmp_path, rank)["pid"], signal.SIGKILL)
    assert command.end(timeout=15) == 1
    drawn, _, said = command.errors.partition("\r\x1b[2Khyper-parallel: error: ")
    assert drawn == "\x1b[?25lstep 1/2"
    assert said.startswith(f"worker {rank} was killed by SIGKILL")
    assert said.endswith("\n\r\x1b[2K\x1b[?25h")
