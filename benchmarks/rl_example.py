"""Runs of examples/rl/grpo-sort.yaml with overrides, and the metrics of their steps.

Nothing is tracked; `BARE` leaves out warm-up, evaluation and checkpoints, too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import ROOT
from processes import scratch

from hyper_parallel.config.rl import RLConfig, load_rl
from hyper_parallel.rl.run import run

EXAMPLE = ROOT / "examples" / "rl" / "grpo-sort.yaml"
BARE = ("warmup=null", "eval.prompts=1", "checkpoint.every=0")
APART = ("roles.actor.devices=0", "roles.rollout.devices=1", "launch.threads=1")
"""An actor and a rollout of one thread each."""


def steps_of(config: RLConfig, first: int = 0) -> list[dict[str, Any]]:
    """The metrics of a run's steps, those of the `first` steps left out."""
    lines = (Path(config.out) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "step_s" in record][first:]


def ran(overrides: Sequence[str], first: int = 0, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Run the example from its start; its summary, and the metrics of its steps from `first` on. `options`: of `run`;
    ``{folder}`` in an override is a folder that is removed at the end."""
    with scratch() as folder:
        given = [override.format(folder=folder) for override in overrides]
        config = load_rl(EXAMPLE, [*given, f"out={folder}/run", "trackers=[]"])
        return run(config, **options), steps_of(config, first)
