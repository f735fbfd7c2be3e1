"""A rollout within a byte budget gives the answers of one without."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from harness.rl_runs import rl_config
from hyper_parallel.errors import ConfigError
from hyper_parallel.rl.roles.models import rollout_model, tokenizer_of
from hyper_parallel.rl.roles.rollout import Rollout
from hyper_parallel.rl.sample import Prompted, Sample


def rollout_of(tmp_path: Any, budget: int | None) -> Rollout:
    memory = {} if budget is None else {"device": budget}
    config = rl_config(
        tmp_path,
        rl={"max_tokens": 12, "temperature": 0.8},
        roles={"rollout": {"devices": 1, "page": 16, "batch": 64, "strategy": {"memory": memory}}},
    )
    tokenizer = tokenizer_of(config)
    torch.manual_seed(0)
    return Rollout(config, rollout_model(config, tokenizer, torch.device("cpu")), tokenizer)


def answers(rollout: Rollout) -> tuple[list[Sample], list[str], int]:
    """All answers, those of an evaluation, and the most pages at once in bytes."""
    new = [
        Prompted(ticket=row, place=place, row=row, prompt=f"{row:03d}=")
        for row in range(24)
        for place in range(4)
    ]
    found = rollout.generate(new, 3)
    most = rollout.cache_bytes
    while rollout.busy:
        found += rollout.generate([], 3)
        most = max(most, rollout.cache_bytes)
    told = [one.text for one in rollout.answer(new, temperature=0.8, seed=3)]
    rollout.close()
    return sorted(found, key=lambda one: (one.row, one.place)), told, most


def test_the_same_answers_within_a_budget(tmp_path: Any) -> None:
    found, told, most = answers(rollout_of(tmp_path, None))
    budget, refusals = 1, list[str]()
    while True:
        try:
            again, told_again, less = answers(rollout_of(tmp_path, budget))
            break
        except ConfigError as error:
            refusals.append(str(error))
            needed = re.search(r"needs at least (\d+)", str(error))
            assert needed is not None
            budget = int(needed[1])
    assert again == found
    assert told_again == told
    assert less < most / 4
    for one in refusals:
        assert one.startswith("roles.rollout.strategy.memory.device is")
        assert "\n" not in one
        assert "memory.host" not in one
        assert "inference." not in one


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"actor": {"strategy": {"memory": {"device": "1GiB", "host": "1GiB"}}}}, "planned for the shape"),
        ({"actor": {"strategy": {"memory": {"cluster": "h100"}}}}, "'memory.cluster' is planned for"),
        (
            {"reference": {"strategy": {"memory": {"expert_load": 2.0}}}},
            "'memory.expert_load' is planned for",
        ),
        (
            {"rollout": {"strategy": {"memory": {"device": "1GiB", "flash": "x"}}}},
            "'memory.flash' is for weights",
        ),
        ({"rollout": {"strategy": {"memory": {"device": "auto"}}}}, "give a number of bytes"),
        ({"rollout": {"strategy": {"memory": {"recompute": "layer"}}}}, "recompute"),
        ({"rollout": {"strategy": {"sequence": True, "axes": {"tensor": 1}}}}, "sequence"),
        ({"sleep": {}}, "set 'host' to a number of bytes"),
        ({"rollout": {"devices": 1}, "sleep": {"host": 1}}, "no two of these take turns"),
    ],
)
def test_what_cannot_be_kept_is_refused(roles: dict[str, Any], message: str, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        rl_config(tmp_path, roles=roles)
    assert "\n" not in str(caught.value)
