"""Groups of Ray actors, in a cluster that the test starts on this machine: the same interface as for local workers."""

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

import pytest

from harness.commands import descendants, running, wait_until
from harness.role_groups import STARTS_S, do, group_config
from hyper_parallel.errors import ConfigError, DataError, GroupError, LaunchError
from hyper_parallel.launch.roles import wait_any
from hyper_parallel.launch.roles.ray_engine import RayEngine, RayGroup

pytestmark = pytest.mark.timeout(900)
CPUS = 4


@pytest.fixture(scope="module")
def engine() -> Iterator[RayEngine]:
    path = os.pathsep.join(os.path.abspath(one) for one in sys.path if one)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = path  # for the workers, which import `harness`
    with RayEngine(cpus=CPUS) as made:
        yield made
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("groups")


@pytest.fixture(scope="module")
def groups(engine: RayEngine, folder: Path) -> list[RayGroup]:
    return [engine.start(group_config(folder, name), timeout_s=STARTS_S) for name in ("actor", "rollout")]


@pytest.fixture
def actor(groups: list[RayGroup]) -> RayGroup:
    if not groups[0].alive:
        groups[0].restart(timeout_s=STARTS_S)
    groups[0].ready.result()
    return groups[0]


@pytest.fixture
def rollout(groups: list[RayGroup]) -> RayGroup:
    groups[1].ready.result()
    return groups[1]


def test_two_groups_at_once_each_have_their_own_process_group(actor: RayGroup, rollout: RayGroup) -> None:
    asked = [group.call([do("total", value=1.0), do("facts")], timeout_s=60) for group in (actor, rollout)]
    for group, future in zip((actor, rollout), asked, strict=True):
        answers = future.result()
        assert [answer[0] for answer in answers] == [3.0, 3.0]
        facts = [answer[1] for answer in answers]
        assert [fact["rank"] for fact in facts] == [0, 1] and {fact["world"] for fact in facts} == {2}
        assert [fact["pid"] for fact in facts] == group.pids and {fact["threads"] for fact in facts} == {1}
    assert len({*actor.pids, *rollout.pids, os.getpid()}) == 5


def test_calls_are_answered_in_order_and_groups_run_at_the_same_time(
    actor: RayGroup, rollout: RayGroup
) -> None:
    slow = actor.call([do("sleep", seconds=2.0)], timeout_s=60)
    behind = actor.call_each([[do("echo", data="a")], [do("echo", data=bytes(3_000_000))]], timeout_s=60)
    fast = rollout.call([do("echo", data=1)], timeout_s=60)
    assert wait_any([slow, behind, fast]) == [fast]
    assert behind.result() == [["a"], [bytes(3_000_000)]] and slow.done()


def test_a_request_beyond_the_cluster_or_beyond_what_is_free_is_refused_at_once(
    engine: RayEngine, actor: RayGroup, rollout: RayGroup, folder: Path
) -> None:
    begun = time.monotonic()
    with pytest.raises(LaunchError, match=r"needs 5 workers with 1 CPU each, .* has room for 4"):
        engine.start(group_config(folder, "many", CPUS + 1), timeout_s=STARTS_S)
    with pytest.raises(LaunchError, match="needs 1 CPU, and 0 are free"):
        engine.start(group_config(folder, "more", 1), timeout_s=STARTS_S)
    assert time.monotonic() - begun < 20


def test_a_users_error_is_one_line_of_its_class_and_the_group_goes_on(actor: RayGroup) -> None:
    with pytest.raises(DataError) as raised:
        actor.call([do("echo", data=1), do("wrong", rank=-1)], timeout_s=60, what="step 7").result()
    assert re.fullmatch(
        r"actor [01], wrong \(2 of 2\), step 7: corpus\.txt is empty; give a file with text",
        str(raised.value),
    )
    assert actor.call([do("total", value=1.0)], timeout_s=60).result() == [[3.0], [3.0]]


def test_a_log_for_each_worker(actor: RayGroup, folder: Path) -> None:
    actor.call([do("say", text="hello from")], timeout_s=60).result()
    for rank in range(2):
        assert f"hello from {rank}" in (folder / f"run/logs/actor-{rank}.log").read_text()


def test_a_killed_worker_is_found_at_once_takes_only_its_group_and_is_restarted(
    actor: RayGroup, rollout: RayGroup
) -> None:
    before = actor.pids
    beside = rollout.call([do("sleep", seconds=0.5), do("total", value=1.0)], timeout_s=60)
    with pytest.raises(GroupError, match=r"actor 1 ended \(ActorDiedError: .*\) in die") as raised:
        actor.call([do("die", rank=1)], timeout_s=600, what="step 7").result()
    assert raised.value.ranks == (1,) and "\n" not in str(raised.value)
    assert beside.result() == [[None, 3.0], [None, 3.0]]
    wait_until(lambda: not any(map(running, before)), "the group has ended", timeout=30)
    actor.restart(timeout_s=STARTS_S).result()
    assert not set(before) & set(actor.pids)
    assert actor.call([do("add", value=1), do("total", value=1.0)], timeout_s=60).result() == [
        [1, 3.0],
        [1, 3.0],
    ]


def test_a_stopped_worker_is_named_at_the_deadline_and_killed(actor: RayGroup) -> None:
    stopped = actor.pids
    with pytest.raises(GroupError) as raised:
        actor.call(
            [do("echo", data=1), do("die", rank=1, number=signal.SIGSTOP)], timeout_s=6.0, what="step 7"
        ).result()
    assert re.match(
        r"no answer within 6 s from actor 1 in .*, step 7, its process on [\d.]+ is silent: suspended, .*; actor 0 in "
        r"die \(2 of 2\), step 7; restart",
        str(raised.value),
    )
    wait_until(lambda: not any(map(running, stopped)), "stopped workers were killed", timeout=30)


def test_a_group_that_is_killed_gives_its_place_to_no_other_and_a_host_object_that_fails_says_why(
    engine: RayEngine, actor: RayGroup, rollout: RayGroup, folder: Path
) -> None:
    rollout.kill()
    with pytest.raises(GroupError, match="it was killed by request"):
        rollout.call([do("facts")], timeout_s=60).result()
    with pytest.raises(LaunchError, match="are free in the Ray cluster"):
        engine.start(group_config(folder, "other"), timeout_s=STARTS_S)
    rollout.config = group_config(folder, "rollout", refuses=1)
    with pytest.raises(ConfigError, match="rollout 1, its start: the model does not fit; make it smaller"):
        rollout.restart(timeout_s=STARTS_S).result()


def test_nothing_outlives_a_controller_that_is_killed(tmp_path: Path) -> None:
    controller = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("ray_controller.py")), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(one) for one in sys.path if one)},
        stdout=subprocess.DEVNULL,
        stderr=(tmp_path / "errors").open("w"),
        start_new_session=True,
    )
    try:
        wait_until(
            lambda: (tmp_path / "pids").exists() or controller.poll() is not None, "group", timeout=300
        )
        assert controller.poll() is None, (tmp_path / "errors").read_text()
        workers = json.loads((tmp_path / "pids").read_text())
        family = {*workers, *descendants(controller.pid)}
        assert len(family) > 3
    finally:
        controller.kill()
        controller.wait()
    wait_until(lambda: not any(map(running, workers)), "no worker is left", timeout=60)
    wait_until(lambda: not any(map(running, family)), "Ray's agents are gone, after a minute", timeout=240)
