"""The run files of examples/."""

from __future__ import annotations

from pathlib import Path

from hyper_parallel import config

EXAMPLES = Path(__file__).parents[2] / "examples"
OTHER_FILES = {"rl", "llamafactory"}
"""Folders whose YAML files have other sections than a run file: those of `rl`, and LlamaFactory's own."""


def run_files() -> list[Path]:
    """The run files of `train`."""
    return [path for path in sorted(EXAMPLES.rglob("*.yaml")) if path.parent.name not in OTHER_FILES]


def captured_examples() -> list[Path]:
    """Those whose step is captured as a whole, and which need nothing that is not in the file.

    Left out: pipelines, which are captured micro-batch by micro-batch; rows with images, which are not captured; a
    model's folder, which a script writes; a budget, whose plan needs tiers, which training measures
    (tests/estimate/test_predicted_budget.py); and cluster/, with strategies that the files of simulate/ have.
    """
    found = []
    for path in run_files():
        run = config.load(path)
        alone = (
            run.model.path is None and run.strategy.memory.device is None and path.parent.name != "cluster"
        )
        if alone and run.strategy.axes.pipeline == 1 and run.train.engine == "graph":
            found.append(path)
    return found
