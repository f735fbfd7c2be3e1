"""Signals to any process of a run, or to all of them at once: one request, heard by every worker."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.commands import Command, descendants, make_config, noted, running, wait_until
from harness.ports import free_port
from hyper_parallel.config import RunConfig

STOPPING = "stopping: the workers finish their step and save; once more ends them at once\n"


class _Run:
    """A command whose two workers are at work."""

    def __init__(self, folder: Path, target: str = "loops", imports: bool = False, **launch: object) -> None:
        self.folder = folder
        self.command = Command(make_config(folder, {"shard": 2}, **launch), target, imports=imports)
        wait_until(
            lambda: (
                self.command.process.poll() is not None
                or all((folder / f"run/rank-{rank}.json").exists() for rank in range(2))
            ),
            "every worker is at work",
            timeout=200,
        )
        assert self.command.process.poll() is None, self.command.errors
        self.family = descendants(self.command.process.pid)
        self.workers = [int(noted(folder, rank)["pid"]) for rank in range(2)]
        (self.server,) = self.family - set(self.workers)

    def reached_by(self, whom: str) -> list[int]:
        """The processes that a signal is sent to."""
        everybody = [self.command.process.pid, *sorted(self.family)]
        one = {
            "command": self.command.process.pid,
            "fork server": self.server,
            "last worker": self.workers[1],
        }
        return everybody if whom == "every process" else [one[whom]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[type[_Run]]:
    """Starts a run, and leaves nothing of it."""
    runs: list[_Run] = []

    def made(target: str = "loops", **how: Any) -> _Run:
        runs.append(_Run(tmp_path, target, **how))
        return runs[-1]

    yield made  # type: ignore[misc]
    for run in runs:
        for pid in [run.command.process.pid, *run.family]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


@pytest.mark.parametrize(
    ("number", "whom"),
    [
        (signal.SIGTERM, "every process"),
        (signal.SIGINT, "every process"),
        (signal.SIGHUP, "every process"),
        (signal.SIGTERM, "last worker"),
        (signal.SIGINT, "last worker"),
        (signal.SIGTERM, "fork server"),
    ],
)
def test_a_signal_to_any_process_of_a_run_stops_it_as_ctrl_c_does(
    start: type[_Run], tmp_path: Path, number: int, whom: str
) -> None:
    run = start(imports=(number, whom) == (signal.SIGTERM, "every process"))
    _send(run.reached_by(whom), number)
    assert run.command.end(timeout=100) == 130
    assert [noted(tmp_path, rank)["stopped"] for rank in range(2)] == [True, True]
    assert noted(tmp_path, 0)["step"] == noted(tmp_path, 1)["step"]
    assert run.command.errors == STOPPING
    wait_until(lambda: not any(map(running, run.family)), "no process is left")


def test_a_command_that_hears_of_the_request_only_as_the_workers_have_ended_says_the_same(
    start: type[_Run], tmp_path: Path
) -> None:
    run = start()
    os.kill(run.command.process.pid, signal.SIGSTOP)
    os.kill(run.workers[1], signal.SIGINT)
    wait_until(lambda: not any(map(running, run.workers)), "the workers have ended")
    os.kill(run.command.process.pid, signal.SIGCONT)
    assert run.command.end(timeout=100) == 130
    assert run.command.errors == STOPPING


def test_a_manager_that_repeats_sigterm_does_not_end_a_save(start: type[_Run], tmp_path: Path) -> None:
    run = start()
    for _ in range(3):
        _send(run.reached_by("every process"), signal.SIGTERM)
        time.sleep(0.02)
    assert run.command.end(timeout=100) == 130
    assert [noted(tmp_path, rank)["stopped"] for rank in range(2)] == [True, True]
    assert run.command.errors == STOPPING


def test_sigusr1_to_any_process_saves_on_every_worker_and_the_run_goes_on(
    start: type[_Run], tmp_path: Path
) -> None:
    run = start()
    for count, whom in enumerate(("command", "last worker", "fork server", "every process"), start=1):
        _send(run.reached_by(whom), signal.SIGUSR1)
        wait_until(
            lambda count=count: all(len(noted(tmp_path, rank)["saves"]) >= count for rank in range(2)),  # type: ignore[misc]
            f"a checkpoint was asked for {count} times",
        )
        time.sleep(1.2)  # what comes sooner is the same request
    assert run.command.process.poll() is None
    _send(run.reached_by("command"), signal.SIGTERM)
    assert run.command.end(timeout=100) == 130
    saves = [noted(tmp_path, rank)["saves"] for rank in range(2)]
    assert saves[0] == saves[1] and len(saves[0]) == 4, "each was one request, also to every process"


def test_where_there_is_nothing_to_save_one_workers_signal_ends_the_run(start: type[_Run]) -> None:
    run = start("prepares")
    _send(run.reached_by("last worker"), signal.SIGTERM)
    assert run.command.end(timeout=100) == 130
    assert run.command.errors == STOPPING
    wait_until(lambda: not any(map(running, run.family)), "no process is left")


def test_where_there_is_nothing_to_save_a_worker_that_cannot_leave_is_not_waited_for(
    start: type[_Run],
) -> None:
    run = start("prepares_deafly", grace=300.0)
    _send(run.reached_by("command"), signal.SIGTERM)
    assert run.command.end(timeout=100) == 130
    assert run.command.errors == STOPPING


def test_a_worker_that_waits_in_a_collective_hears_a_signal_and_passes_it_on(
    start: type[_Run], tmp_path: Path
) -> None:
    run = start("waits_natively")
    time.sleep(0.5)
    _send([run.workers[0]], signal.SIGTERM)
    assert run.command.end(timeout=100) == 130
    assert [noted(tmp_path, rank)["stopped"] for rank in range(2)] == [True, True]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_every_process_before_the_workers_are_there(tmp_path: Path, number: int) -> None:
    command = Command(make_config(tmp_path, {"shard": 2}), "ignores_stop", imports=True)
    wait_until(lambda: bool(descendants(command.process.pid)), "the fork server is there")
    family = descendants(command.process.pid)
    _send([command.process.pid, *family], number)
    assert command.end(timeout=100) == 130
    assert command.errors == ""
    wait_until(lambda: not any(map(running, family)), "no process is left")


def test_workers_that_do_not_end_in_the_grace_time_are_named_and_killed(start: type[_Run]) -> None:
    run = start("ignores_stop", grace=1.0)
    _send(run.reached_by("every process"), signal.SIGTERM)
    assert run.command.end(timeout=100) == 130
    at = r"\(before the first step, running(, in ignores_stop at harness/targets\.py:\d+)?\)"
    assert re.fullmatch(
        f"{STOPPING}did not end in the 1 s of launch.grace and is killed: worker 0 {at}, 1 {at}; committed "
        "checkpoints are safe\n",
        run.command.errors,
    ), run.command.errors
    wait_until(lambda: not any(map(running, run.family)), "no process is left")


def test_ctrl_z_suspends_the_workers_too_and_the_run_goes_on(start: type[_Run], tmp_path: Path) -> None:
    run = start()
    _send(run.reached_by("command"), signal.SIGTSTP)
    suspended = [run.command.process.pid, *run.workers]
    wait_until(lambda: all(_state(pid) == "T" for pid in suspended), "the workers are suspended")
    _send(run.reached_by("command"), signal.SIGCONT)
    wait_until(lambda: all(_state(pid) != "T" for pid in suspended), "they go on")
    _send(run.reached_by("command"), signal.SIGTERM)
    assert run.command.end(timeout=100) == 130
    assert [noted(tmp_path, rank)["stopped"] for rank in range(2)] == [True, True]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_is_named_and_nothing_is_left(
    start: type[_Run], tmp_path: Path, rank: int
) -> None:
    run = start(timeout=4.0)
    _send([run.workers[rank]], signal.SIGSTOP)
    assert run.command.end(timeout=100) == 1
    assert run.command.errors.startswith(
        f"hyper-parallel: error: worker {rank} has given no sign of life for "
    )
    assert "its process is stopped (SIGSTOP, a debugger)" in run.command.errors
    assert "continues from the last committed checkpoint" in run.command.errors
    assert run.command.errors.count("\n") == 1
    wait_until(lambda: not any(map(running, run.family)), "no process is left")


def test_workers_that_are_suspended_together_go_on(start: type[_Run], tmp_path: Path) -> None:
    run = start(timeout=2.0)
    _send(run.workers, signal.SIGSTOP)
    time.sleep(6)
    _send(run.workers, signal.SIGCONT)
    time.sleep(1)
    assert run.command.process.poll() is None, run.command.errors
    _send(run.reached_by("command"), signal.SIGTERM)
    assert run.command.end(timeout=100) == 130
    assert [noted(tmp_path, rank)["stopped"] for rank in range(2)] == [True, True]


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# Under Slurm: srun starts each worker, and signals reach all of them, twice where the step and the job are signalled.


@contextlib.contextmanager
def _tasks(config: RunConfig, target: str, imports: bool = False) -> Iterator[list[Command]]:
    shared = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    tasks = []
    try:
        for rank in range(2):
            env = {**shared, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
            tasks.append(Command(config, target, name=f"task{rank}", env=env, imports=imports))
        folder = Path(config.out).parent
        wait_until(
            lambda: all((folder / f"run/rank-{rank}.json").exists() for rank in range(2)),
            "every task is at work",
            timeout=200,
        )
        yield tasks
    finally:
        for task in tasks:
            task.process.kill()


@pytest.mark.parametrize("reached", [[0, 1], [1]])
def test_slurms_sigterm_stops_every_task_however_many_it_reaches(tmp_path: Path, reached: list[int]) -> None:
    with _tasks(make_config(tmp_path, {"shard": 2}), "loops", imports=len(reached) == 1) as tasks:
        for _ in range(2):
            for rank in reached:
                tasks[rank].process.send_signal(signal.SIGTERM)
            time.sleep(0.02)
        codes = [task.end(timeout=100) for task in tasks]
        said = [task.errors for task in tasks]
        assert codes == [130, 130], said
    assert [noted(tmp_path, rank)["stopped"] for rank in range(2)] == [True, True]
    assert said == ["", ""]


def test_slurms_notice_saves_and_the_tasks_go_on(tmp_path: Path) -> None:
    with _tasks(make_config(tmp_path, {"shard": 2}), "loops") as tasks:
        for task in tasks:
            task.process.send_signal(signal.SIGUSR1)
        wait_until(
            lambda: all(noted(tmp_path, rank)["saves"] for rank in range(2)),
            "the notice was taken on every task",
        )
        assert [task.process.poll() for task in tasks] == [None, None]
        for task in tasks:
            task.process.send_signal(signal.SIGTERM)
        assert [task.end(timeout=100) for task in tasks] == [130, 130]


def test_where_there_is_nothing_to_save_one_tasks_signal_ends_every_task(tmp_path: Path) -> None:
    with _tasks(make_config(tmp_path, {"shard": 2}), "prepares") as tasks:
        tasks[1].process.send_signal(signal.SIGTERM)
        codes = [task.end(timeout=100) for task in tasks]
        said = [task.errors for task in tasks]
        assert codes == [130, 130], said
    assert said == ["", ""]


def test_a_task_that_does_not_end_in_the_grace_time_leaves(tmp_path: Path) -> None:
    with _tasks(make_config(tmp_path, {"shard": 2}, grace=1.0), "ignores_stop") as tasks:
        tasks[0].process.send_signal(signal.SIGTERM)
        assert [task.end(timeout=100) for task in tasks] == [130, 130]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.matrix)])
def test_a_task_that_is_stopped_is_named_and_ended(tmp_path: Path, rank: int) -> None:
    with _tasks(make_config(tmp_path, {"shard": 2}, timeout=8.0), "loops") as tasks:
        time.sleep(3)
        tasks[rank].process.send_signal(signal.SIGSTOP)
        codes = [task.end(timeout=100) for task in tasks]
        said = [task.errors for task in tasks]
        assert codes[1 - rank] == 1 and codes[rank] == -signal.SIGKILL, said
    assert said[rank] == ""
    assert said[1 - rank].startswith(
        f"hyper-parallel: error: worker {rank} has given no sign of life for "
    ), said
    assert said[1 - rank].count("\n") == 1
