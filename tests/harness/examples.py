"""The run files of examples/."""

from __future__ import annotations

from pathlib import Path

from hyper_parallel import config

EXAMPLES = Path(__file__).parents[2] / "examples"


def captured_examples() -> list[Path]:
    """Those whose step is captured as a whole: a pipeline is captured micro-batch by micro-batch, and rows with images
    are not."""
    found = []
    for path in sorted(EXAMPLES.rglob("*.yaml")):
        if path.parent.name == "rl":  # files with other sections
            continue
        run = config.load(path)
        if run.strategy.axes.pipeline == 1 and run.train.engine == "graph":
            found.append(path)
    return found
