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
    """Those whose step is captured as a whole: a pipeline is captured micro-batch by micro-batch, and rows with images
    are not. Files of a model's folder are left out: the folder is written by a script."""
    found = []
    for path in run_files():
        run = config.load(path)
        if run.strategy.axes.pipeline == 1 and run.train.engine == "graph" and run.model.path is None:
            found.append(path)
    return found
