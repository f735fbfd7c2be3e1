"""Rewards of before a resume are not taken for those of answers that have the same ticket after it."""

from __future__ import annotations

import time
from pathlib import Path

from harness.rl_runs import rl_config, samples_of
from hyper_parallel.rl.controller.scorer import Scored, scorer_of


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
        found: list[Scored] = []
        ends = time.monotonic() + 30
        while scorer.pending and time.monotonic() < ends:
            found += scorer.results(0.2)
    assert found == [Scored(sample.ticket, sample.place, 2.0)]
