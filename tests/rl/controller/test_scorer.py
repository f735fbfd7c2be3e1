"""Rewards and turns belong to the answers that they were asked for, also after a resume."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.rl_runs import rl_config, samples_of
from hyper_parallel.errors import DataError, RewardError
from hyper_parallel.rl.controller.scorer import Scored, Scorer
from hyper_parallel.rl.controller.scorer_kinds import scorer_of
from hyper_parallel.rl.sample import Prompted, Sample


def test_a_reward_of_before(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import time\n"
        "def score(prompt, answer, task):\n"
        "    time.sleep(task['wait'])\n"
        "    return task['worth']\n"
    )
    config = rl_config(tmp_path / "run", task={"reward": "mine.py:score"})
    sample = samples_of(config)[0]
    with scorer_of(config, tmp_path) as scorer:
        scorer.submit(sample, {"prompt": "1=", "worth": 1.0, "wait": 0.5})
        scorer.begin_anew()
        assert scorer.pending == 0
        scorer.submit(sample, {"prompt": "1=", "worth": 2.0, "wait": 0.0})
        found = awaited(scorer)
    assert found == [Scored(sample.ticket, sample.place, 2.0)]


def environment_scorer(tmp_path: Path, turn: str) -> Scorer:
    (tmp_path / "mine.py").write_text(
        "from hyper_parallel.rl.environments import Turn\n"
        "class Mine:\n"
        "    def reset(self, task):\n"
        "        return task['prompt']\n"
        "    def step(self, answer):\n"
        f"        return {turn}\n"
    )
    config = rl_config(tmp_path / "run", task={"reward": "exact_match", "environment": "mine.py:Mine"})
    return scorer_of(config, tmp_path)


TOOL = {"role": "tool", "content": "27", "name": "calculator"}
CONVERSATION = [{"role": "user", "content": "1="}]


@pytest.mark.parametrize(
    ("prompt", "turn", "appended"),
    [
        ("1=", "Turn(text='more')", "more"),
        (CONVERSATION, "Turn(text='more')", {"role": "user", "content": "more"}),
        (CONVERSATION, f"Turn(message={TOOL})", TOOL),
    ],
)
def test_what_the_policy_reads_next(prompt: Any, turn: str, appended: Any, tmp_path: Path) -> None:
    sample = samples_of(rl_config(tmp_path / "run"))[0]
    with environment_scorer(tmp_path, turn) as scorer:
        scorer.submit(sample, {"prompt": prompt})
        assert awaited(scorer) == [Scored(sample.ticket, sample.place, 0.0, appended)]


def test_an_evaluation_goes_on_behind_its_own_tokens(tmp_path: Path) -> None:
    """Turn by turn, until there is no room; what was drawn is handed on as it is."""
    seen: list[Prompted] = []

    def answers(asked: Sequence[Prompted]) -> list[Sample]:
        seen.extend(asked)
        made = samples_of(rl_config(tmp_path / "run"))[0]
        return [
            replace(made, row=one.row, tokens=(*(one.before.tokens if one.before else ()), 7, 7, 0))
            for one in asked
        ]

    with environment_scorer(tmp_path, "Turn(text='more', reward=1.0)") as scorer:
        assert scorer.all_of(answers, [{"prompt": "1="}, {"prompt": CONVERSATION}], 8) == [3.0, 3.0]
        assert scorer.pending == 0
    assert len(seen) == 6
    assert [one.before.tokens for one in seen if one.row == 1 and one.before] == [
        (7, 7, 0),
        (7, 7, 0, 7, 7, 0),
    ]
    assert [one.appended for one in seen if one.row == 1] == ["", *[{"role": "user", "content": "more"}] * 2]


def test_a_message_behind_a_text(tmp_path: Path) -> None:
    with environment_scorer(tmp_path, f"Turn(message={TOOL})") as scorer:
        scorer.submit(samples_of(rl_config(tmp_path / "run"))[0], {"prompt": "1="})
        with pytest.raises(DataError, match="a message of the role 'tool', and the row's prompt is a text"):
            awaited(scorer)


@pytest.mark.parametrize(
    "turn",
    [
        "Turn(text='a', message={'role': 'tool', 'content': 'b'})",
        "Turn(message={'role': 'assistant', 'content': 'b'})",
        "Turn(message={'content': 'b'})",
        "Turn(message={'role': 'tool', 'content': 3})",
        "Turn(message='b')",
    ],
)
def test_a_wrong_message_costs_its_episode(turn: str, tmp_path: Path) -> None:
    sample = samples_of(rl_config(tmp_path / "run"))[0]
    with environment_scorer(tmp_path, turn) as scorer:
        scorer.submit(sample, {"prompt": CONVERSATION})
        [found] = awaited(scorer)
        assert found == Scored(sample.ticket, sample.place, None, failed=found.failed)
        assert found.failed
        assert scorer.failed == 1


def test_rewards_that_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "mine.py").write_text("def score(prompt, answer, task):\n    return task['gold']\n")
    config = rl_config(tmp_path / "run", task={"reward": "mine.py:score"})
    sample = samples_of(config)[0]
    reason = "it raised KeyError: 'gold' (mine.py, line 2, in score)"
    with scorer_of(config, tmp_path) as scorer:
        for _ in range(2):
            scorer.submit(sample, {"prompt": "13="})
            assert awaited(scorer) == [Scored(sample.ticket, sample.place, None, failed=reason)]
        [warning] = caplog.messages
        assert reason in warning
        assert "'13='" in warning
        for rewards in ([], [1.0, 2.0], [1.0, None]):
            scorer.check(rewards)
        for rewards, words in (([None], "1 of 1"), ([0.0, None, None], "2 of 3")):
            with pytest.raises(RewardError, match=words) as caught:
                scorer.check(rewards)
            assert reason in str(caught.value)
            assert "task.max_failed: 0.5" in str(caught.value)


def awaited(scorer: Scorer) -> list[Scored]:
    found: list[Scored] = []
    ends = time.monotonic() + 60
    while scorer.pending and time.monotonic() < ends:
        found += scorer.results(0.2)
    return found
