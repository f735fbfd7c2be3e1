"""How many workers are started where the planner chooses the axes."""

from __future__ import annotations

import os
from typing import Any

import pytest

from hyper_parallel import config as files
from hyper_parallel.errors import ConfigError
from hyper_parallel.launch.rendezvous import workers_of


def workers(strategy: Any, **launch: Any) -> int:
    file = {"version": 1, "out": "x", "model": {"config": {"model_type": "llama"}}, "data": {"train": "a"}}
    return workers_of(
        files.from_dict(
            {**file, "strategy": strategy, "train": {"batch": 24}, "launch": {"device": "cpu", **launch}}
        )
    )


def test_written_axes_stated_workers_or_the_cores_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert workers({"axes": {"shard": 3}}) == 3
    assert workers("auto", workers=4) == 4
    assert workers("auto") == 6
    assert workers("auto", nodes=2, rendezvous="10.0.0.1:29500") == 12
    with pytest.raises(ConfigError, match="the product of the given axes, 4, does not divide the 6 cores"):
        workers({"axes": {"shard": "auto", "tensor": 4}})
