"""Axes that are left to the planner: what is open, and what a file that is laid on another does to it."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel.config import RunConfig, dump, from_dict, yaml12
from hyper_parallel.config.schema import json_schema
from hyper_parallel.errors import ConfigError

ALL = {"pipeline", "replicate", "shard", "context", "tensor_y", "tensor_x", "expert"}
BESIDES = {"memory.device", "sequence", "context.method", "memory.shard", "memory.recompute"}
OF_PIPELINES = {"pipeline.schedule", "pipeline.virtual"}


def run(strategy: Any, *overrides: str, **sections: Any) -> RunConfig:
    file = {"version": 1, "out": "x", "model": {"config": {"model_type": "llama"}}, "data": {"train": "a"}}
    return from_dict({**file, "strategy": strategy, **sections}, overrides)


@pytest.mark.parametrize(
    ("strategy", "overrides", "axes", "besides", "world"),
    [
        ("auto", (), ALL, BESIDES, 1),
        ({"axes": "auto"}, ("strategy.axes.tensor=2",), ALL - {"tensor_x"}, BESIDES, 2),
        ({"axes": {"tensor": "auto", "shard": 2}}, (), {"tensor_x"}, BESIDES, 2),
        ({"axes": {"shard": 2}, "sequence": True}, ("strategy=auto",), ALL, BESIDES - {"sequence"}, 1),
        ("auto", ("strategy.memory.recompute=none",), ALL, BESIDES - {"memory.recompute"}, 1),
        ({"axes": "auto", "memory": {"reshard_after_forward": True}}, (), ALL, BESIDES - {"memory.shard"}, 1),
    ],
)
def test_what_is_open(
    strategy: Any, overrides: tuple[str, ...], axes: set[str], besides: set[str], world: int
) -> None:
    found = run(strategy, *overrides)
    if "pipeline" in axes:
        besides = besides | OF_PIPELINES
    assert (set(found.strategy.axes.open), set(found.strategy.chosen)) == (axes, besides)
    assert found.strategy.axes.world == world and found.open
    assert from_dict(yaml12.parse(dump(found), "dumped")) == found
    assert RunConfig.model_validate_json(found.model_dump_json()) == found
    with pytest.raises(ConfigError, match="to the planner"):
        _ = found.effective_strategy


def test_a_pipeline_is_left_open_with_what_the_file_writes_of_it() -> None:
    found = run({"axes": {"pipeline": "auto", "shard": "auto"}, "pipeline": {"schedule": "1f1b"}})
    assert "pipeline.virtual" in found.strategy.chosen and "pipeline.schedule" not in found.strategy.chosen
    assert from_dict(yaml12.parse(dump(found), "dumped")) == found
    with pytest.raises(ConfigError, match=r"axes.pipeline is 1; set axes.pipeline"):
        run({"axes": {"shard": "auto"}, "pipeline": {"schedule": "1f1b"}})


def test_a_run_on_one_device_has_nothing_open() -> None:
    found = run("auto", "launch.workers=1")
    assert not found.open and found.effective_strategy.axes.world == 1


def test_workers_that_the_written_axes_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"multiply to 2, which does not divide 'launch.workers' \(3\)"):
        run({"axes": {"tensor": 2, "shard": "auto"}}, launch={"workers": 3})


def test_nothing_of_it_is_written_where_nothing_is_open() -> None:
    assert "chosen" not in dump(run({"axes": {"shard": 2}}))


def test_editors_know_auto() -> None:
    schema = json_schema()
    for field in (schema["properties"]["strategy"], schema["$defs"]["Strategy"]["properties"]["axes"]):
        assert {"const": "auto"} in field["anyOf"]
    assert "chosen" not in schema["$defs"]["Strategy"]["properties"]
    assert "string" in schema["$defs"]["Axes"]["properties"]["shard"]["type"]
