"""The same run under torchrun, and under the environments of Slurm and MPI."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.commands import Command, descendants, make_config, noted, running, wait_until
from harness.ports import free_port
from hyper_parallel.config import RunConfig


def _torchrun(config: RunConfig, target: str, workers: int) -> subprocess.Popen[str]:
    file = Path(config.out).parent / "config.json"
    file.write_text(config.model_dump_json())
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(workers),
    ]
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "harness.command", str(file), f"harness.targets:{target}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _by_hand(config: RunConfig, target: str, environments: list[dict[str, str]]) -> list[tuple[int, str]]:
    """The command once for each environment, as srun or mpirun starts it: the exit code and what it writes."""
    tasks = [
        Command(config, target, name=f"task{rank}", env=environment)
        for rank, environment in enumerate(environments)
    ]
    try:
        return [(task.end(), task.errors) for task in tasks]
    finally:
        for task in tasks:
            task.process.kill()


def _slurm(world: int) -> list[dict[str, str]]:
    shared = {
        "SLURM_STEP_NUM_TASKS": str(world),
        "SLURM_STEP_TASKS_PER_NODE": str(world),
        "SLURM_NODEID": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    return [{**shared, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(world)]


def test_under_torchrun_the_process_is_the_worker(tmp_path: Path) -> None:
    process = _torchrun(make_config(tmp_path, {"shard": 2}), "facts", 2)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    facts = [noted(tmp_path, rank) for rank in range(2)]
    assert [(fact["world"], fact["local_rank"], fact["total"]) for fact in facts] == [(2, 0, 1), (2, 1, 1)]
    assert (tmp_path / "run/logs/rank-1.log").exists()


def test_another_number_of_workers_than_the_strategys_is_said_once(tmp_path: Path) -> None:
    process = _torchrun(make_config(tmp_path, {"shard": 2, "tensor": 2}), "facts", 2)
    _, errors = process.communicate(timeout=60)
    said = [line for line in errors.splitlines() if line.startswith("hyper-parallel: error: ")]
    assert said == [
        "hyper-parallel: error: torchrun started 2 workers, but the strategy's axes multiply to 4 "
        "(shard 2 · tensor_x 2); start 4, or change the axes"
    ]
    assert "exitcode  : 2" in errors


def test_sigterm_under_torchrun_lets_the_workers_finish(tmp_path: Path) -> None:
    process = _torchrun(make_config(tmp_path, {"shard": 2}), "loops", 2)
    wait_until(
        lambda: all((tmp_path / f"run/rank-{rank}.json").exists() for rank in range(2)),
        "both workers are at work",
    )
    family = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert [noted(tmp_path, rank)["stopped"] for rank in range(2)] == [True, True]
    wait_until(lambda: not any(map(running, family)), "no process is left", timeout=10)


def test_a_rank_that_is_stopped_under_torchrun_is_named_and_ended(tmp_path: Path) -> None:
    process = _torchrun(make_config(tmp_path, {"shard": 2}, timeout=8.0), "loops", 2)
    wait_until(
        lambda: all((tmp_path / f"run/rank-{rank}.json").exists() for rank in range(2)),
        "both workers are at work",
        timeout=200,
    )
    family = descendants(process.pid)
    os.kill(noted(tmp_path, 0)["pid"], signal.SIGSTOP)
    _, errors = process.communicate(timeout=200)
    said = [line for line in errors.splitlines() if line.startswith("hyper-parallel: ")]
    assert len(said) == 1 and said[0].startswith(
        "hyper-parallel: error: worker 0 has given no sign of life"
    ), errors
    wait_until(lambda: not any(map(running, family)), "no process is left")


def test_under_slurm_a_users_error_is_said_once_and_every_task_ends_with_2(tmp_path: Path) -> None:
    ends = _by_hand(make_config(tmp_path, {"shard": 2}), "wrong_data", _slurm(2))
    assert [code for code, _ in ends] == [2, 2]
    said = "".join(errors for _, errors in ends)
    assert said == "hyper-parallel: error: corpus.txt is empty; give a file with text\n"


def test_under_slurm_the_cause_is_shown_and_not_what_follows_from_it(tmp_path: Path) -> None:
    ends = _by_hand(make_config(tmp_path, {"shard": 2}), "one_raises", _slurm(2))
    assert [code for code, _ in ends] == [1, 1]
    said = "".join(errors for _, errors in ends)
    assert said.startswith("worker 1 failed") and said.count("Traceback") == 1


def test_under_slurm_on_one_machine_everything_listens_on_loopback(tmp_path: Path) -> None:
    ends = _by_hand(make_config(tmp_path, {"shard": 2}), "facts", _slurm(2))
    assert [code for code, _ in ends] == [0, 0], ends
    assert {address for rank in range(2) for address in noted(tmp_path, rank)["listening"]} == {"0100007F"}


def test_under_mpi_the_stated_rendezvous_serves(tmp_path: Path) -> None:
    environments = [{"PMI_RANK": str(rank), "PMI_SIZE": "2"} for rank in range(2)]
    config = make_config(tmp_path, {"shard": 2}, rendezvous=f"127.0.0.1:{free_port()}")
    ends = _by_hand(config, "facts", environments)
    assert [code for code, _ in ends] == [0, 0], ends
    assert [noted(tmp_path, rank)["total"] for rank in range(2)] == [1, 1]


@pytest.mark.parametrize("wrong", ["train.stpes=3", "launch.device=npu"])
def test_under_torchrun_what_every_worker_finds_is_said_once(tmp_path: Path, wrong: str) -> None:
    file = tmp_path / "run.json"
    file.write_text(make_config(tmp_path, {"shard": 2}, device="auto").model_dump_json())
    (tmp_path / "unread").write_text("some text")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "hyper_parallel", "train", str(file), wrong],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("hyper-parallel: ")]
    assert len(said) == 1, done.stderr
    assert "exitcode  : 2" in done.stderr
