"""Local workers: what they are given, what they show, and how every kind of end is told."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.commands import Command, make_config, noted
from harness.ports import free_port
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import LaunchError
from hyper_parallel.launch import run


def test_workers_meet_are_given_their_place_and_listen_on_loopback_only(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"shard": 2, "tensor": 2}, threads=3)
    assert run(config, "harness.targets:facts") == 0
    facts = [noted(tmp_path, rank) for rank in range(4)]
    assert [fact["total"] for fact in facts] == [6] * 4
    assert [(fact["local_rank"], fact["world"], fact["local_world"]) for fact in facts] == [
        (rank, 4, 4) for rank in range(4)
    ]
    assert {(fact["threads"], fact["omp"]) for fact in facts} == {(3, "3")}
    assert {fact["folder"] for fact in facts} == {os.getcwd()}
    assert len({fact["pid"] for fact in facts} | {os.getpid()}) == 5
    addresses = {address for fact in facts for address in fact["listening"]}
    assert addresses == {"0100007F"}, "127.0.0.1, as /proc/net/tcp writes it"
    assert {fact["interface"] for fact in facts} == {"lo"}


def test_the_cores_are_shared_out_when_no_number_of_threads_is_stated(tmp_path: Path) -> None:
    assert run(make_config(tmp_path, {"shard": 2}), "harness.targets:facts") == 0
    assert noted(tmp_path, 1)["threads"] == max(1, len(os.sched_getaffinity(0)) // 2)


def test_one_worker_is_a_process_with_a_group_and_no_port(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"shard": 4}, workers=1)
    assert run(config, "harness.targets:facts") == 0
    fact = noted(tmp_path, 0)
    assert (fact["world"], fact["total"]) == (1, 0) and fact["pid"] != os.getpid()
    assert set(fact["listening"]) <= {"0100007F"}


def test_the_command_imports_no_torch(tmp_path: Path) -> None:
    # The command asserts it at its end.
    command = Command(make_config(tmp_path, {"shard": 2}), "facts", imports=True)
    assert command.end() == 0, command.errors


def test_workers_see_this_process_path_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYPER_PARALLEL_TEST", "changed after the fork server started")
    assert run(make_config(tmp_path, {}), "harness.targets:sees_main") == 0
    fact = noted(tmp_path, 0)
    assert fact["path"] == sys.path
    assert fact["home"] == "changed after the fork server started"


def test_rank_zero_shows_and_the_rest_goes_to_the_logs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(make_config(tmp_path, {"shard": 2}), "harness.targets:talk") == 0
    shown = capfd.readouterr()
    assert shown.out == "printed by 0\n"
    assert shown.err == "WARNING: alarmed by 0\n"
    first, second = ((tmp_path / f"run/logs/rank-{rank}.log").read_text() for rank in range(2))
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}"
    for rank, text in enumerate((first, second)):
        assert f"native noise of {rank}" in text
        assert f"warned by {rank}" in text
        assert re.search(
            rf"^{stamp} INFO step 7 micro 2 hyper_parallel.test: informed by {rank}$", text, re.MULTILINE
        )
        assert re.search(rf"^{stamp} WARNING torch.distributed: torch is noisy$", text, re.MULTILINE)
    assert "printed by 1" in second and "printed by 0" not in first


def test_a_users_error_is_one_line_said_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(make_config(tmp_path, {"shard": 2}), "harness.targets:wrong_data") == 2
    assert capfd.readouterr().err == "hyper-parallel: error: corpus.txt is empty; give a file with text\n"
    assert not (tmp_path / "run").exists(), "a refused run leaves no folder"


def test_what_follows_from_another_ranks_failure_is_not_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(make_config(tmp_path, {"shard": 2}), "harness.targets:one_follows") == 2
    assert capfd.readouterr().err == "hyper-parallel: error: the cause\n"


def test_a_log_that_takes_nothing_more_does_not_reach_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(make_config(tmp_path, {}), "harness.targets:cannot_log") == 2
    assert capfd.readouterr().err == "hyper-parallel: error: the disk is full\n"


def test_a_refused_run_leaves_what_was_there(tmp_path: Path) -> None:
    config = make_config(tmp_path / "new" / "deep", {})
    assert run(config, "harness.targets:wrong_data") == 2
    assert list(tmp_path.iterdir()) == []
    log = tmp_path / "new" / "deep" / "run" / "logs" / "rank-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("of an earlier run\n")
    assert run(config, "harness.targets:wrong_data") == 2
    assert log.read_text().startswith("of an earlier run\n")
    assert run(config, "harness.targets:exits") == 1 and "corpus.txt" in log.read_text()


def test_a_defect_shows_the_rank_and_the_traceback_and_not_what_follows_from_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(make_config(tmp_path, {"shard": 4}), "harness.targets:one_raises") == 1
    shown = capfd.readouterr().err
    assert shown.startswith("worker 1 failed") and shown.endswith("ValueError: the defect\n")
    assert shown.count("Traceback") == 1 and "gloo" not in shown


def test_a_rank_that_does_not_come_to_a_collective_ends_the_run_and_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, {"shard": 2}, timeout=5)
    assert run(config, "harness.targets:one_is_late") == 1
    shown = capfd.readouterr().err
    assert shown.startswith("hyper-parallel: error: worker 1 has stood still for 5.")
    assert "while the others wait for it; it is before the first step, running, in one_is_late at" in shown
    assert shown.count("\n") == 1


def test_a_worker_that_leaves_without_a_word_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(make_config(tmp_path, {"shard": 2}), "harness.targets:exits") == 1
    assert "worker 0 exited with code 7 without saying why" in capfd.readouterr().err


def test_a_crash_of_native_code_is_named_and_its_trace_is_in_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(make_config(tmp_path, {"shard": 2}), "harness.targets:segfaults") == 1
    assert "worker 1 died of SIGSEGV" in capfd.readouterr().err
    assert "in segfaults" in (tmp_path / "run/logs/rank-1.log").read_text()


def test_an_unknown_target_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(make_config(tmp_path, {}), "harness.targets:nothing") == 2
    assert "has no function 'nothing'" in capfd.readouterr().err


def test_a_taken_port_is_one_line_and_starts_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = make_config(tmp_path, {"shard": 2}, rendezvous=f"127.0.0.1:{port}")
        with pytest.raises(LaunchError, match=f"port {port} on 127.0.0.1 is taken") as raised:
            run(config, "harness.targets:facts")
        assert "\n" not in str(raised.value)
        command = Command(config, "facts")
        assert command.end() == 2
        assert command.errors.count("\n") == 1 and "is taken" in command.errors
    assert not (tmp_path / "run/rank-0.json").exists()


def test_a_stated_port_is_used_and_can_be_used_again(tmp_path: Path) -> None:
    port = free_port()
    for _ in range(2):
        config = make_config(tmp_path, {"shard": 2}, rendezvous=f"127.0.0.1:{port}")
        assert run(config, "harness.targets:facts") == 0
    assert f"at 127.0.0.1:{port}" in (tmp_path / "run/logs/rank-1.log").read_text()


def test_an_address_of_another_machine_is_one_line(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"shard": 2}, rendezvous="203.0.113.7:29500")
    with pytest.raises(
        LaunchError, match=r"203\.0\.113\.7 of launch\.rendezvous is no address of this machine"
    ):
        run(config, "harness.targets:facts")


def test_a_run_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file, not a folder")
    with pytest.raises(LaunchError, match="cannot write to the run's folder"):
        run(make_config(tmp_path, {}), "harness.targets:facts")


def test_two_machines_meet_at_the_stated_port(tmp_path: Path) -> None:
    where: dict[str, Any] = {"nodes": 2, "rendezvous": f"127.0.0.1:{free_port()}"}
    nodes = [
        Command(make_config(tmp_path, {"shard": 4}, node_rank=node, **where), "facts", name=f"node{node}")
        for node in range(2)
    ]
    assert [node.end() for node in nodes] == [0, 0], [node.errors for node in nodes]
    facts = [noted(tmp_path, rank) for rank in range(4)]
    assert [(fact["local_rank"], fact["local_world"], fact["total"]) for fact in facts] == [
        (0, 2, 6),
        (1, 2, 6),
        (0, 2, 6),
        (1, 2, 6),
    ]


def test_workers_that_do_not_spread_over_the_machines_are_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"shard": 4}, nodes=3, rendezvous="127.0.0.1:29500")
    with pytest.raises(LaunchError, match="4 workers cannot be spread evenly over 3 machines"):
        run(config, "harness.targets:facts")


def test_a_broken_torch_is_told_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/torch.py").write_text("raise ImportError('libfoo.so: cannot open shared object')")
    command = Command(make_config(tmp_path, {}), "facts", path=[str(tmp_path / "broken")], imports=True)
    assert command.end() == 2
    assert "libfoo.so: cannot open shared object" in command.errors
    assert command.errors.count("\n") == 1


def test_the_config_arrives_whole(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"tensor": 2, "shard": 2})
    again = RunConfig.model_validate_json(config.model_dump_json())
    assert again == config and again.strategy.axes.order[-2:] == ("tensor_x", "shard")
    assert json.loads(config.model_dump_json())["strategy"]["axes"]


def test_an_interactive_script_without_a_main_guard_works(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(make_config(tmp_path, {"shard": 2}).model_dump_json())
    script = tmp_path / "script.py"
    script.write_text(
        "from hyper_parallel.config import RunConfig\nfrom hyper_parallel.launch import run\n"
        f"print(run(RunConfig.model_validate_json(open({str(file)!r}).read()), 'harness.targets:facts'))\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
