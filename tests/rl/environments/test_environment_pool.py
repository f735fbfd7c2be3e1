"""Environments in processes: episodes keep their state, also when another episode's environment kills the process."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.errors import ConfigError, DataError
from hyper_parallel.rl.environment_pool import EnvironmentPool, Reply
from hyper_parallel.rl.environments import Turn

FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def shared() -> Iterator[EnvironmentPool]:
    """Two workers. The limit is generous for work on a busy machine and short for what hangs."""
    with EnvironmentPool("user_environments.py:Counting", workers=2, time_limit_s=3.0, folder=FOLDER) as pool:
        yield pool


def replies(pool: EnvironmentPool, count: int) -> dict[Hashable, Reply]:
    """The next replies by key."""
    found: dict[Hashable, Reply] = {}
    end = time.monotonic() + 120
    while len(found) < count and time.monotonic() < end:
        found.update(pool.results(1.0))
    assert len(found) == count
    return found


def begin(pool: EnvironmentPool, *keys: Any) -> None:
    """Episodes whose prompts are their keys."""
    for key in keys:
        pool.reset(key, {"prompt": f"p{key}"})
    assert {key: reply.prompt for key, reply in replies(pool, len(keys)).items()} == {
        key: f"p{key}" for key in keys
    }


def test_episodes_keep_their_state(shared: EnvironmentPool) -> None:
    begin(shared, 1, 2, 3)
    for key in (1, 2, 3):
        shared.step(key, "a")
    first = replies(shared, 3)
    assert {key: reply.turn for key, reply in first.items()} == {
        key: Turn(text=f"2 p{key} a", reward=0.5) for key in (1, 2, 3)
    }
    shared.step(2, "b")
    assert replies(shared, 1)[2].turn == Turn(text="3 p2 a b", reward=0.5)
    for key in (1, 2, 3):
        shared.step(key, "end")
    assert {key: reply.turn.reward for key, reply in replies(shared, 3).items() if reply.turn} == {
        1: 3,
        2: 4,
        3: 3,
    }
    with pytest.raises(ConfigError, match="has no episode"):
        shared.step(1, "a")


@pytest.mark.parametrize(("answer", "reason"), [("hang", "longer than its limit"), ("die", "died twice")])
def test_an_environment_that_kills_its_process_costs_its_episode_only(
    shared: EnvironmentPool, answer: str, reason: str
) -> None:
    before = shared.counters["restored"]
    keys = ["a", "b", "c", "d"]
    begin(shared, *keys)
    for key in keys:
        shared.step(key, "x")
    replies(shared, 4)
    for key in keys:
        shared.step(key, answer if key == "a" else "y")
    found = replies(shared, 4)
    assert reason in (found.pop("a").failed or "")
    assert {key: reply.turn and reply.turn.text for key, reply in found.items()} == {
        key: f"3 p{key} x y" for key in "bcd"
    }
    for key in "bcd":
        shared.step(key, "end")
    assert all(reply.turn == Turn(reward=4.0, done=True) for reply in replies(shared, 3).values())
    assert shared.counters["restored"] > before


def test_an_episode_that_cannot_be_repeated_fails() -> None:
    with EnvironmentPool(
        "user_environments.py:Counting", workers=1, time_limit_s=30.0, folder=FOLDER
    ) as pool:
        begin(pool, "steady", "random", "killer")
        pool.step("random", "random")
        replies(pool, 1)
        pool.step("killer", "die")
        assert replies(pool, 1)["killer"].failed
        pool.step("random", "x")
        pool.step("steady", "x")
        found = replies(pool, 2)
        assert "other turns for the same answers" in (found["random"].failed or "")
        assert found["steady"].turn == Turn(text="2 psteady x", reward=0.5)


def test_failures_of_an_episode(shared: EnvironmentPool) -> None:
    begin(shared, 1, 2)
    shared.step(1, "raise")
    shared.step(2, "number")
    found = replies(shared, 2)
    assert found[1].failed == "it raised ValueError: no (user_environments.py, line 34, in step)"
    assert found[2].failed == "the text of a turn is int, and a str is needed"
    shared.reset(1, {})
    assert (replies(shared, 1)[1].failed or "").startswith(
        "it raised KeyError: 'prompt' (user_environments.py"
    )
    shared.reset(1, {"prompt": "hang"})
    assert "longer than its limit" in (replies(shared, 1)[1].failed or "")


def test_a_dropped_episode_gives_no_reply(shared: EnvironmentPool) -> None:
    begin(shared, 1)
    shared.step(1, "a")
    shared.drop(1)
    shared.drop(1)
    begin(shared, 1)
    shared.step(1, "b")
    assert replies(shared, 1)[1].turn == Turn(text="2 p1 b", reward=0.5)
    shared.drop(1)
    assert shared.results(0.2) == []


def test_misuse(shared: EnvironmentPool) -> None:
    begin(shared, 1)
    with pytest.raises(ConfigError, match="has an episode"):
        shared.reset(1, {"prompt": "p"})
    shared.step(1, "a")
    with pytest.raises(ConfigError, match="waits for a reply"):
        shared.step(1, "a")
    replies(shared, 1)
    shared.drop(1)
    with pytest.raises(DataError, match="no JSON"):
        shared.reset(2, {"prompt": b"x"})
    with pytest.raises(ConfigError, match="did you mean 'calculator'"):
        EnvironmentPool("calculater")


def test_the_calculator_in_processes() -> None:
    with EnvironmentPool("calculator", workers=1) as pool:
        pool.reset("k", {"prompt": "1+1=", "answer": "2"})
        assert replies(pool, 1)["k"].prompt == "1+1="
        pool.step("k", "<calc>1+1</calc>")
        assert replies(pool, 1)["k"].turn == Turn(text="<result>2</result>")
        pool.step("k", "2")
        assert replies(pool, 1)["k"].turn == Turn(reward=1.0, done=True)
