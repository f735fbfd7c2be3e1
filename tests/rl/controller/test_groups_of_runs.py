"""How the groups of a run are started."""

from __future__ import annotations

from pathlib import Path

from harness.rl_runs import rl_config
from hyper_parallel.rl.controller.workers import groups_of, launch_of


def test_ray_chooses_devices(tmp_path: Path) -> None:
    roles = {"actor": {"devices": 0}, "rollout": {"devices": 1}}
    for engine, devices in (("local", (1,)), ("ray", ())):
        config = rl_config(tmp_path, roles={**roles, "engine": engine}, launch={"device": "auto"})
        assert launch_of(config, groups_of(config)[1], 2).devices == devices
