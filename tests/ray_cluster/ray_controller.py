"""A controller as a process of its own: `python ray_controller.py FOLDER`. It never ends by itself."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from harness.role_groups import STARTS_S, do, group_config
from hyper_parallel.launch.roles.ray_engine import RayEngine

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    engine = RayEngine(cpus=1)
    group = engine.start(group_config(folder, "alone", 1), timeout_s=STARTS_S)
    group.ready.result()
    group.call([do("sleep", seconds=1000)], timeout_s=2000)
    assert "torch" not in sys.modules, "the controller imported torch"
    (folder / "pids.new").write_text(json.dumps(group.pids))
    (folder / "pids.new").rename(folder / "pids")
    time.sleep(1000)
