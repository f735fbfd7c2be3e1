"""The pool of reward processes: whatever a reward function does costs the reward of its own sample only."""

from __future__ import annotations

import math
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hyper_parallel.errors import ConfigError, DataError, LaunchError
from hyper_parallel.rl.rewards.pool import RewardPool
from hyper_parallel.rl.rewards.reward import Reward

FOLDER = Path(__file__).parent
NAME = "user_rewards.py:behave"


@pytest.fixture(scope="module")
def shared() -> Iterator[RewardPool]:
    """Two workers. The limit is generous for work on a busy machine and short for what hangs."""
    with RewardPool(NAME, workers=2, time_limit_s=3.0, folder=FOLDER) as pool:
        yield pool


def rewards(pool: RewardPool, *answers: str) -> list[Reward]:
    """The rewards of answers, in their order."""
    pool.submit_many((number, "prompt", answer, {"extra": 1}) for number, answer in enumerate(answers))
    found: dict[Any, Reward] = {}
    end = time.monotonic() + 60
    while len(found) < len(answers) and time.monotonic() < end:
        for key, reward in pool.results(1.0):
            assert key not in found
            found[key] = reward
    return [found[number] for number in range(len(answers))]


def gone(pid: int) -> bool:
    """Whether a process has ended, within seconds."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_rewards_come_back_with_their_keys(shared: RewardPool) -> None:
    for number in range(200):
        shared.submit(("key", number), "p", f"value:{number}", {})
    found = []
    while shared.waiting:
        found += shared.results(1.0)
    assert sorted((key[1], reward.value) for key, reward in found) == [(n, float(n)) for n in range(200)]
    assert shared.results() == []


def test_the_function_gets_prompt_and_row(shared: RewardPool) -> None:
    shared.submit(0, [{"role": "user", "content": "hi"}], "prompt", {"extra": 10})
    [(_, reward)] = shared.results(30.0)
    assert reward.value == 11.0


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("value:nan", "it returned nan, and a finite number is needed"),
        ("value:inf", "it returned inf, and a finite number is needed"),
        ("object", "it returned object, and a number is needed"),
        ("text", "it returned str, and a number is needed"),
        ("raise", "it raised ValueError: first line second line (user_rewards.py, line 28, in behave)"),
        ("exit", "it raised SystemExit: 3 (user_rewards.py, line 30, in behave)"),
    ],
)
def test_no_number_costs_its_sample_only(shared: RewardPool, answer: str, reason: str) -> None:
    before = dict(shared.counters)
    [first, bad, last] = rewards(shared, "value:1", answer, "value:2")
    assert (first.value, bad.value, bad.failed, last.value) == (1.0, None, reason, 2.0)
    assert shared.counters["restarts"] == before["restarts"]
    changed = {key for key, count in shared.counters.items() if count != before[key]}
    assert changed == {"done", "not_a_number" if "returned" in reason else "raised"}


def test_a_function_that_hangs_is_killed(shared: RewardPool) -> None:
    before = dict(shared.counters)
    hanging = ["busy", "library", "deaf", "stop"]
    found = rewards(shared, *["value:1"] * 8, *hanging, *["value:2"] * 8)
    assert {reward.failed for reward in found[8:12]} == {"it took longer than its limit of 3 s"}
    assert [reward.value for reward in found if not reward.failed] == [1.0] * 8 + [2.0] * 8
    assert shared.counters["timed_out"] == before["timed_out"] + 4
    assert shared.counters["restarts"] == before["restarts"] + 4
    assert shared.counters["retried"] == before["retried"]


@pytest.mark.parametrize(("answer", "how"), [("die", "SIGKILL"), ("crash", "SIGSEGV")])
def test_a_worker_that_dies_is_started_again(shared: RewardPool, answer: str, how: str) -> None:
    before = dict(shared.counters)
    found = rewards(shared, "value:1", answer, "value:2")
    assert found[1].failed == f"its process died twice, the second time with {how}"
    assert [found[0].value, found[2].value] == [1.0, 2.0]
    assert shared.counters["died"] == before["died"] + 1
    assert shared.counters["retried"] == before["retried"] + 1


def test_a_death_that_does_not_repeat_costs_nothing(shared: RewardPool, tmp_path: Path) -> None:
    [reward] = rewards(shared, f"die once:{tmp_path / 'mark'}")
    assert reward.value == 0.5


def test_workers_that_are_killed_or_stopped_from_outside(shared: RewardPool) -> None:
    for number in (signal.SIGKILL, signal.SIGSTOP):
        for pid in shared.pids:
            os.kill(pid, number)
        found = rewards(shared, *["value:1"] * 6)
        # A stopped worker costs the sample that it was given; all others are computed by its successor.
        assert sum(reward.value == 1.0 for reward in found) >= (6 if number == signal.SIGKILL else 4)


def test_what_a_function_prints_is_no_reply(shared: RewardPool) -> None:
    assert [reward.value for reward in rewards(shared, "print", "true")] == [1.0, 1.0]


def test_submit_does_not_wait_for_hanging_workers() -> None:
    with RewardPool(NAME, workers=1, time_limit_s=600, folder=FOLDER) as pool:
        pool.submit("first", "p", "hang", {})
        for number in range(50):  # far more than a connection holds
            pool.submit(number, "p" * 100_000, "value:1", {})
        assert pool.results(0.05) == []
        assert pool.waiting == 51
        [pid] = pool.pids
    assert gone(pid)
    with pytest.raises(LaunchError, match="closed"):
        pool.submit("more", "p", "value:1", {})


def test_children_of_a_function_die_with_its_worker() -> None:
    word = f"child{secrets.token_hex(8)}"
    with RewardPool(NAME, workers=1, time_limit_s=2.0, folder=FOLDER) as pool:
        [reward] = rewards(pool, f"child:{word}")
        assert reward.failed is not None
    left = [
        path
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if path.exists() and word.encode() in path.read_bytes() and not gone(int(path.parent.name))
    ]
    assert left == []


def test_workers_die_with_their_parent() -> None:
    program = (
        "import os, signal\nfrom hyper_parallel.rl.rewards.pool import RewardPool\n"
        f"pool = RewardPool({NAME!r}, workers=2, time_limit_s=600, folder={str(FOLDER)!r})\n"
        "pool.submit(0, '', 'busy', {})\nprint(*pool.pids, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", program]
    # No pipe for standard error: workers would hold it, and this test wait for them.
    found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    pids = list(map(int, found.stdout.split()))
    assert len(pids) == 2
    assert all(map(gone, pids))


def test_what_cannot_be_loaded_is_one_line() -> None:
    for name, message in [
        ("exact_mach", "did you mean 'exact_match'"),
        ("user_rewards.py:behav", "did you mean 'behave'"),
        ("no_such_module:f", "ModuleNotFoundError"),
    ]:
        with pytest.raises(ConfigError, match=message) as error:
            RewardPool(name, workers=2, folder=FOLDER)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="at least 1"):
        RewardPool("math", workers=0)
    with pytest.raises(ConfigError, match="must be larger than 0"):
        RewardPool("math", time_limit_s=math.nan)


def test_a_module_that_ends_its_process(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import os\nos._exit(7)\n")
    with pytest.raises(LaunchError, match="exit code 7"):
        RewardPool("ends.py:f", workers=1, folder=tmp_path)


def test_rows_that_are_no_json_are_refused(shared: RewardPool) -> None:
    with pytest.raises(DataError, match="being no JSON"):
        shared.submit(0, "p", "value:1", {"bytes": b"x"})
    assert shared.waiting == 0


ANSWERS = st.sampled_from(["value:1", "value:2", "value:nan", "raise", "object", "die"])


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ANSWERS, max_size=12))
def test_each_sample_ends_once(shared: RewardPool, answers: list[str]) -> None:
    for answer, reward in zip(answers, rewards(shared, *answers), strict=True):
        if answer in ("value:1", "value:2"):
            assert reward.value == float(answer[-1])
        else:
            assert reward.value is None
            assert reward.failed
