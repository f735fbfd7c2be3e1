"""Groups of local workers: calls and answers, errors, deaths, deadlines, restarts, and what is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.commands import descendants, running, wait_until
from harness.role_groups import STARTS_S, do, group_config
from hyper_parallel.errors import ConfigError, DataError, GroupError, LaunchError
from hyper_parallel.launch.roles import Group, LocalEngine, wait_any
from hyper_parallel.launch.roles.local import LocalGroup
from hyper_parallel.launch.worker_supervisor import fork_server


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with LocalEngine() as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("groups")


@pytest.fixture(scope="module")
def shared(engine: LocalEngine, folder: Path) -> LocalGroup:
    return engine.start(group_config(folder, "actor"), timeout_s=STARTS_S)


@pytest.fixture(scope="module")
def second(engine: LocalEngine, folder: Path) -> LocalGroup:
    return engine.start(group_config(folder, "rollout", colour="red"), timeout_s=STARTS_S)


@pytest.fixture
def actor(shared: LocalGroup) -> LocalGroup:
    if not shared.alive:
        shared.restart(timeout_s=STARTS_S)
    shared.ready.result()
    return shared


@pytest.fixture
def rollout(second: LocalGroup) -> LocalGroup:
    second.ready.result()
    return second


def refused(group: Group, *instructions: Any, timeout_s: float = 30.0) -> Exception:
    with pytest.raises(Exception) as raised:
        group.call(instructions, timeout_s=timeout_s, what="step 7").result()
    assert "\n" not in str(raised.value)
    return raised.value


def test_two_groups_at_once_each_have_their_own_process_group(actor: LocalGroup, rollout: LocalGroup) -> None:
    asked = [group.call([do("total", value=1.0), do("facts")], timeout_s=30) for group in (actor, rollout)]
    for group, future in zip((actor, rollout), asked, strict=True):
        answers = future.result()
        assert [answer[0] for answer in answers] == [3.0, 3.0]
        facts = [answer[1] for answer in answers]
        assert [fact["rank"] for fact in facts] == [0, 1] and {fact["world"] for fact in facts} == {2}
        assert [fact["pid"] for fact in facts] == group.pids and {fact["threads"] for fact in facts} == {1}
        assert all(fact["settings"] == group.config.settings for fact in facts)
    assert not set(actor.pids) & set(rollout.pids)


def test_a_group_keeps_its_state_and_answers_in_the_order_of_the_calls(actor: LocalGroup) -> None:
    (begun,), _ = actor.call([do("add", value=0)], timeout_s=30).result()
    futures = [actor.call([do("add", value=1), do("add", value=1)], timeout_s=30) for _ in range(20)]
    assert [future.result()[1] for future in futures] == [
        [begun + 2 * turn + 1, begun + 2 * turn + 2] for turn in range(20)
    ]
    assert actor.call([], timeout_s=30).result() == [[], []]


def test_each_rank_can_have_a_list_of_its_own(actor: LocalGroup) -> None:
    future = actor.call_each(
        [[do("echo", data="a")], [do("echo", data="b"), do("echo", data=2)]], timeout_s=30
    )
    assert future.result() == [["a"], ["b", 2]]
    with pytest.raises(LaunchError, match="has 2 workers, and 1 lists"):
        actor.call_each([[]], timeout_s=30)


def test_messages_larger_than_a_socket_takes_arrive_whole(actor: LocalGroup) -> None:
    data = os.urandom(20_000_000)
    assert actor.call([do("echo", data=data)], timeout_s=60).result() == [[data], [data]]


def test_what_cannot_be_sent_is_raised_at_the_call(actor: LocalGroup) -> None:
    with pytest.raises(Exception, match=r"pickle|local object"):  # Python 3.13 has the other words
        actor.call([do("echo", data=lambda: 0)], timeout_s=30)
    assert actor.call([do("echo", data=1)], timeout_s=30).result() == [[1], [1]]


def test_the_first_answer_is_waited_for(actor: LocalGroup, rollout: LocalGroup) -> None:
    slow = actor.call([do("sleep", seconds=1.0)], timeout_s=30)
    fast = rollout.call([do("sleep", seconds=0.0)], timeout_s=30)
    assert wait_any([slow, fast], 30) == [fast] and not slow.done()
    assert wait_any([slow], 0.0) == [] and not slow.wait(0.0)
    assert wait_any([slow, fast]) == [fast] and slow.wait() and wait_any([slow, fast]) == [slow, fast]
    assert wait_any([]) == []


def test_a_users_error_is_one_line_of_its_class_and_the_group_goes_on(actor: LocalGroup) -> None:
    pids = actor.pids
    error = refused(actor, do("echo", data=1), do("wrong", rank=-1), do("crash"))
    assert type(error) is DataError
    assert re.fullmatch(
        r"actor [01], wrong \(2 of 3\), step 7: corpus\.txt is empty; give a file with text", str(error)
    )
    assert actor.call([do("total", value=1.0)], timeout_s=30).result() == [[3.0], [3.0]]
    assert actor.alive and actor.pids == pids


def test_calls_behind_one_that_failed_do_not_begin(actor: LocalGroup) -> None:
    (begun,), _ = actor.call([do("add", value=0)], timeout_s=30).result()
    failing = actor.call([do("sleep", seconds=0.2), do("wrong", rank=-1)], timeout_s=30)
    behind = actor.call([do("add", value=1)], timeout_s=30)
    with pytest.raises(DataError):
        failing.result()
    with pytest.raises(GroupError, match=r"add: not begun, since the call before it failed: actor \d, wrong"):
        behind.result()
    assert actor.call([do("add", value=0)], timeout_s=30).result()[0] == [begun]


def test_an_unknown_operation_and_a_tensor_are_refused(actor: LocalGroup) -> None:
    assert "has no operation 'echoo'; did you mean 'echo'?" in str(refused(actor, do("echoo")))
    assert "has no operation '_private'" in str(refused(actor, do("_private")))
    error = refused(actor, do("tensor"))
    assert type(error) is LaunchError and "holds a torch.Tensor, and a controller has no torch" in str(error)
    assert actor.alive


def test_a_defect_is_named_with_its_log_and_the_group_is_ended(actor: LocalGroup) -> None:
    error = refused(actor, do("crash"))
    assert isinstance(error, GroupError) and error.operation == "crash"
    assert re.match(
        r"actor [01] failed with KeyError: 'the defect' in crash \(1 of 1\), step 7; its log: ", str(error)
    )
    log = Path(str(error).rpartition("its log: ")[2])
    assert log.name == f"actor-{error.ranks[0]}.log" and "raise KeyError" in log.read_text()
    assert not actor.alive
    again = refused(actor, do("facts"))
    assert "group 'actor' has no workers: actor" in str(again) and "restart the group to go on" in str(again)


def test_an_error_of_one_rank_that_others_wait_for_ends_the_group(actor: LocalGroup) -> None:
    assert str(refused(actor, do("wrong", rank=1))).startswith("actor 1, wrong (1 of 1), step 7: corpus.txt")
    assert not actor.alive


def test_a_killed_worker_is_found_at_once_and_takes_only_its_group(
    actor: LocalGroup, rollout: LocalGroup
) -> None:
    others, before = rollout.pids, set(actor.pids)
    beside = rollout.call([do("sleep", seconds=0.5), do("total", value=1.0)], timeout_s=30)
    error = refused(actor, do("echo", data=1), do("die", rank=1), timeout_s=200)
    assert isinstance(error, GroupError) and (error.group, error.ranks) == ("actor", (1,))
    assert str(error).startswith(
        "actor 1 was killed by SIGKILL (out of memory, or by hand) in die (2 of 2), step 7; its log: "
    )
    wait_until(lambda: not any(map(running, before)), "the group has ended", timeout=20)
    assert beside.result() == [[None, 3.0], [None, 3.0]] and rollout.pids == others
    actor.restart(timeout_s=STARTS_S).result()
    assert actor.alive and not before & set(actor.pids)
    assert actor.call([do("add", value=1), do("total", value=1.0)], timeout_s=30).result() == [
        [1, 3.0],
        [1, 3.0],
    ]


def test_a_worker_that_dies_between_two_calls_is_named_at_the_next(actor: LocalGroup) -> None:
    os.kill(actor.pids[0], signal.SIGKILL)
    wait_until(lambda: not actor.alive, "the death is noticed", timeout=20)
    assert "its worker 0 was killed by SIGKILL" in str(refused(actor, do("facts")))


def test_a_stopped_worker_ends_the_call_at_its_deadline_and_is_named(actor: LocalGroup) -> None:
    stopped = actor.pids
    begun = time.monotonic()
    error = refused(actor, do("echo", data=1), do("die", rank=1, number=signal.SIGSTOP), timeout_s=1.5)
    assert time.monotonic() - begun >= 1.5
    assert isinstance(error, GroupError) and error.ranks[0] == 1
    assert str(error).startswith(
        "no answer within 1.5 s from actor 1 in die (2 of 2), step 7, suspended (SIGSTOP); actor 0 in die (2 of 2)"
    )
    wait_until(lambda: not any(map(running, stopped)), "stopped workers were killed", timeout=20)


def test_a_worker_that_is_stopped_while_a_large_message_is_sent_blocks_nobody(
    actor: LocalGroup, rollout: LocalGroup
) -> None:
    os.kill(actor.pids[0], signal.SIGSTOP)
    future = actor.call([do("echo", data=bytes(20_000_000))], timeout_s=1.5, what="step 7")
    assert rollout.call([do("echo", data=1)], timeout_s=30).result() == [[1], [1]]
    with pytest.raises(GroupError, match=r"from actor 0 in echo \(not begun\), step 7, suspended"):
        future.result()


def test_an_answer_that_comes_too_late_is_no_answer_to_a_later_call(actor: LocalGroup) -> None:
    late = actor.call([do("sleep", seconds=1.0), do("echo", data="late")], timeout_s=0.3, what="step 7")
    with pytest.raises(GroupError, match=r"no answer within 0\.3 s from actor 0 in sleep \(1 of 2\), step 7"):
        late.result()
    actor.restart(timeout_s=STARTS_S).result()
    time.sleep(1.0)
    assert actor.call([do("echo", data="new")], timeout_s=30).result() == [["new"], ["new"]]


def test_a_call_that_waits_behind_another_ends_at_its_own_deadline(actor: LocalGroup) -> None:
    first = actor.call([do("sleep", seconds=1.0)], timeout_s=30, what="step 7")
    behind = actor.call([do("add", value=1)], timeout_s=0.2)
    with pytest.raises(GroupError, match=r"add: not begun within 0\.2 s behind 'actor: sleep, step 7'"):
        behind.result()
    assert first.result() == [[None], [None]] and actor.alive


def test_killed_by_request_and_restarted_while_busy(actor: LocalGroup) -> None:
    busy, pids = actor.call([do("sleep", seconds=100)], timeout_s=200), actor.pids
    actor.kill()
    assert not any(map(running, pids)) and not actor.alive and actor.pids == []
    with pytest.raises(GroupError, match="it was killed by request"):
        busy.result()
    actor.kill()
    actor.restart(timeout_s=STARTS_S).result()
    busy = actor.call([do("sleep", seconds=100)], timeout_s=200)
    actor.restart(timeout_s=STARTS_S).result()
    with pytest.raises(GroupError, match="it was restarted"):
        busy.result()


@pytest.mark.parametrize(
    ("setting", "kind", "line"),
    [
        ("refuses", ConfigError, "broken 1, its start: the model does not fit; make it smaller"),
        ("crashes", GroupError, "broken 1 failed with ValueError: the defect in its start; its log: "),
        ("dies", GroupError, "broken 1 exited with code 3 without saying why in its start; its log: "),
    ],
)
def test_a_host_object_that_cannot_be_made_fails_the_start(
    engine: LocalEngine, folder: Path, setting: str, kind: type, line: str
) -> None:
    group = engine.start(group_config(folder, f"broken-{setting}", **{setting: 1}), timeout_s=STARTS_S)
    queued = group.call([do("facts")], timeout_s=STARTS_S)
    with pytest.raises(kind) as raised:
        group.ready.result()
    assert (
        str(raised.value).startswith(line.replace("broken", f"broken-{setting}"))
        and type(raised.value) is kind
    )
    with pytest.raises(GroupError, match=f"group 'broken-{setting}' has no workers: "):
        queued.result()
    assert not group.alive


def test_a_start_that_takes_too_long_ends(engine: LocalEngine, folder: Path) -> None:
    group = engine.start(group_config(folder, "slow"), timeout_s=0.0)
    with pytest.raises(GroupError, match="no answer within 0 s from slow 0 in its start"):
        group.ready.result()
    group.restart(timeout_s=STARTS_S).result()
    assert group.alive
    group.kill()


def test_a_name_is_given_once_and_names_no_folder(
    engine: LocalEngine, folder: Path, actor: LocalGroup
) -> None:
    with pytest.raises(LaunchError, match="there is a group 'actor' already"):
        engine.start(group_config(folder, "actor"), timeout_s=STARTS_S)
    with pytest.raises(ValueError, match="name"):
        group_config(folder, "../actor")


def test_devices_are_named_for_each_worker(folder: Path) -> None:
    config = group_config(folder, "actor")
    with pytest.raises(ValueError, match="'devices' names 3 devices for 2 workers of group 'actor'"):
        type(config).model_validate({**config.model_dump(), "devices": [0, 1, 2]})


def test_a_log_for_each_worker_and_nothing_on_the_terminal(
    actor: LocalGroup, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    actor.call([do("say", text="hello from")], timeout_s=30).result()
    for rank in range(2):
        assert f"hello from {rank}" in (folder / f"run/logs/actor-{rank}.log").read_text()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_workers_leave_signals_to_the_controller(actor: LocalGroup, number: signal.Signals) -> None:
    busy = actor.call([do("sleep", seconds=0.5), do("total", value=1.0)], timeout_s=30)
    for pid in actor.pids:
        os.kill(pid, number)
    assert busy.result() == [[None, 3.0], [None, 3.0]] and actor.alive


@pytest.mark.parametrize("ends", ["killed", "raises"])
def test_no_process_outlives_its_controller(tmp_path: Path, ends: str) -> None:
    controller = subprocess.Popen(
        [sys.executable, "-m", "harness.role_groups", str(tmp_path), ends],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_until(
        lambda: (tmp_path / "pids").exists() or controller.poll() is not None, "groups", timeout=STARTS_S
    )
    family = {*json.loads((tmp_path / "pids").read_text()), *descendants(controller.pid)}
    assert len(family) >= 4
    if ends == "killed":
        controller.kill()
    assert controller.wait(30) != 0
    wait_until(lambda: not any(map(running, family)), "no process is left", timeout=20)


def test_a_fork_server_that_is_killed_is_named_and_replaced(engine: LocalEngine, actor: LocalGroup) -> None:
    assert engine._server is not None
    pids = actor.pids
    engine._server._process.kill()
    wait_until(lambda: not actor.alive and not any(map(running, pids)), "the end is noticed", timeout=20)
    with pytest.raises(GroupError, match="the process that holds the workers was killed by SIGKILL"):
        actor.call([do("facts")], timeout_s=30).result()
    actor.restart(timeout_s=STARTS_S).result()
    assert actor.call([do("add", value=1)], timeout_s=30).result() == [[1], [1]]


def test_an_engine_that_is_closed_leaves_no_process_and_fails_what_is_open(
    engine: LocalEngine, actor: LocalGroup, folder: Path
) -> None:
    busy, pids = actor.call([do("sleep", seconds=100)], timeout_s=200), actor.pids
    server = engine._server
    engine.close()
    assert pids and not any(map(running, pids))
    with pytest.raises(GroupError, match="the engine was closed"):
        busy.result()
    engine.close()
    with pytest.raises(LaunchError, match="the engine is closed"):
        engine.start(group_config(folder, "another"), timeout_s=STARTS_S)
    with pytest.raises(LaunchError, match="the engine is closed"):
        actor.restart(timeout_s=STARTS_S)
    assert server is not None and fork_server() is server, "it serves this process's next run"
