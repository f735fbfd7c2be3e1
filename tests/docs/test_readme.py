"""What the README shows is what there is: its commands parse, its loop runs, its figures are the measured ones."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

from hyper_parallel import Strategy
from hyper_parallel.config import load
from hyper_parallel.integration.trainer import SpreadTrainer

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SHOWN = "\n".join([README, *(page.read_text() for page in sorted((ROOT / "docs/tutorial").glob("*.md")))])
COMMANDS = sorted(set(re.findall(r"hyper-parallel (?:train|verify) (examples/[^\n#`]*)", SHOWN)))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_one_that_the_file_takes(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    file, *overrides = [word for word in shlex.split(command) if not word.startswith("--") and word != "gloo"]
    assert load(file, overrides).effective_strategy.axes.world in (1, 4)


def _python(containing: str) -> str:
    [found] = [code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if containing in code]
    return found


def test_the_loop_is_the_example_that_the_tests_run() -> None:
    shown = _python("hp.parallelize(")
    assert textwrap.indent(shown.strip(), "    ") in (ROOT / "examples/own_loop.py").read_text()


def test_the_trainer_is_called_with_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from hyper_parallel.integration import transformers

    given: dict[str, Any] = {}

    class Called:
        def __init__(self, **arguments: Any) -> None:
            given.update(arguments)

        def train(self) -> None:
            given["trained"] = True

    monkeypatch.setattr(transformers, "HyperParallelTrainer", Called, raising=False)
    exec(_python("HyperParallelTrainer"), {"model": None, "arguments": None, "rows": None})
    assert given.pop("trained")
    taken = {*signature(SpreadTrainer.__init__).parameters, *signature(Trainer.__init__).parameters}
    assert given.keys() <= taken
    assert Strategy.model_validate({"version": 1, **given["strategy"]}).axes.world == 4


def test_the_shown_strategy_is_the_quickstarts() -> None:
    config = load(ROOT / "examples/quickstart.yaml")
    assert "axes: {shard: 2, tensor: 2}" in README
    assert (config.strategy.axes.shard, config.strategy.axes.tensor, config.strategy.sequence) == (2, 2, True)
    for key, value in (("steps", config.train.steps), ("batch", config.train.batch)):
        assert f"  {key}: {value}\n" in README
    assert f"sequence: {config.data.sequence}}}" in README


def test_the_speed_figures_are_the_measured_ones() -> None:
    cases = json.loads((ROOT / "benchmarks/results/overhead.json").read_text())["cases"]
    for name, case in cases.items():
        row = next(line for line in README.splitlines() if line.startswith(f"| {name}, "))
        assert f"| {case['ratio']:.3f} | {case['low']:.3f} to {case['high']:.3f} |" in row
        assert case["high"] <= 1.02
