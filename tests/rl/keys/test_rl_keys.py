"""Keys of a reinforcement-learning file that nothing would read are refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.rl_runs import rl_config
from hyper_parallel.errors import ConfigError

KEYS = [
    ("launch", {"workers": 2}, "'launch.workers' is not used here; it is the number of devices that"),
    ("launch", {"nodes": 2, "rendezvous": "a:1"}, "'launch.nodes' is not used here; several machines are"),
    ("checkpoint", {"resume_from": 2}, "'checkpoint.resume_from' is not used here"),
    ("rl", {"critic": {"lr": 0.1}}, "'rl.critic' is not used here; it is the critic of ppo"),
    ("rl", {"truncate": 3.0}, "'rl.truncate' is not used here"),
    ("rl", {"algorithm": "rloo", "scale": "none"}, "'rl.scale' is not used here"),
    ("task", {"held_out": "file.jsonl"}, "'task.held_out' is not used here"),
    ("roles", {"reference": {"devices": 1}}, "'roles.reference' is not used here"),
    (
        "roles",
        {"rollout": {"threads": 2}},
        "'roles.rollout.threads' is not used here; 'rollout' takes turns in",
    ),
    ("roles", {"actor": {"strategy": {"overlap": {"schedule": "none"}}}}, "section 'overlap' schedules"),
    ("roles", {"actor": {"strategy": {"expert_balance": {}}}}, "'expert_balance' moves experts between"),
]


@pytest.mark.parametrize(("section", "given", "line"), KEYS, ids=lambda one: str(one)[:40])
def test_keys_that_nothing_reads_are_refused(
    section: str, given: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=line) as raised:
        rl_config(tmp_path, **{section: given})
    assert "leave it out" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_roles_apart_have_threads_of_their_own(tmp_path: Path) -> None:
    rl_config(tmp_path, roles={"rollout": {"devices": 1, "threads": 2}}, launch={"workers": None})
    rl_config(tmp_path, roles={"split": "auto"}, launch={"workers": 2})
