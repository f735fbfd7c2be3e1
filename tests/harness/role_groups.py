"""Groups of `harness.role_host` for tests, and a controller as a process of its own."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from hyper_parallel.config.launch import RoleLaunch
from hyper_parallel.launch.roles import Instruction, LocalEngine

STARTS_S = 120.0
"""Enough for a first import of torch on a busy machine."""


def group_config(folder: Path, name: str, workers: int = 2, **settings: Any) -> RoleLaunch:
    """A group on the CPU, one thread each."""
    return RoleLaunch.model_validate(
        {
            "name": name,
            "out": str(folder / "run"),
            "host": "harness.role_host:RoleHost",
            "settings": settings,
            "launch": {"device": "cpu", "threads": 1},
            "strategy": {"axes": {"replicate": workers}},
        }
    )


def do(operation: str, **arguments: Any) -> Instruction:
    """An instruction."""
    return Instruction(operation, arguments)


def _controller(folder: Path, ends: str) -> None:
    """Two groups, whose process ids go to a file; then it ends as `ends` says."""
    engine = LocalEngine()
    groups = [engine.start(group_config(folder, name), timeout_s=STARTS_S) for name in ("actor", "rollout")]
    for group in groups:
        group.ready.result()
    busy = groups[0].call([do("sleep", seconds=100)], timeout_s=200)
    pids = [pid for group in groups for pid in group.pids]
    (folder / "pids.new").write_text(json.dumps(pids))
    (folder / "pids.new").rename(folder / "pids")
    assert "torch" not in sys.modules, "the controller imported torch"
    if ends == "raises":
        raise SystemExit("the controller fails")
    busy.wait()
    time.sleep(100)


if __name__ == "__main__":
    _controller(Path(sys.argv[1]), sys.argv[2])
