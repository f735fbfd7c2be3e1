"""Every example with a strategy computes what one device computes: its model cut small, its degrees cut to two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.examples import run_files
from harness.small_models import shrunken
from hyper_parallel.config import yaml12
from hyper_parallel.config.load import from_dict
from hyper_parallel.config.model import ModelConfig
from hyper_parallel.step.build import transformers_config
from hyper_parallel.verify import verify_file

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = {
    str(file.relative_to(FOLDER)): content
    for file in run_files()
    if "axes" in (content := yaml12.parse(file.read_text(), file.name)).get("strategy", {})
    # Rows with images are compared in tests/train/test_multimodal.py, a model's folder in tests/examples.
    and content["train"].get("engine") != "eager"
    and "config" in content["model"]
}


def shrunk(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same file with a small model, little text, a batch of a row for each rank, and every degree above 1 a 2."""
    (folder / "text.txt").write_text("a line of text, and another one.\n" * 200)
    small = shrunken(transformers_config(ModelConfig.model_validate(content["model"])))
    axes = {axis: min(degree, 2) for axis, degree in content["strategy"]["axes"].items()}
    rows = axes.get("replicate", 1) * axes.get("shard", 1)
    train = {key: value for key, value in content["train"].items() if key in ("optimizer", "loss", "clip")}
    memory = dict(content["strategy"].get("memory", {}))
    if "recompute_layers" in memory:
        memory["recompute_layers"] = 1
    strategy = {**content["strategy"], "axes": axes, "memory": memory}
    return {
        **content,
        "out": str(folder / "run"),
        "model": {"config": {key: value for key, value in small.items() if key != "vocab_size"}},
        "data": {
            "train": str(folder / "text.txt"),
            "tokenizer": {"vocab_size": 300},
            "sequence": 32,
            "cache": str(folder / "cache"),
        },
        "train": {**train, "batch": 2 * rows, "micro_batch": 1},
        "strategy": strategy,
    }


def test_there_are_examples() -> None:
    assert {"quickstart.yaml", "llama-405b.yaml", "deepseek-v3.yaml"} <= EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_in_small(name: str, tmp_path: Path) -> None:
    content = shrunk(EXAMPLES[name], tmp_path)
    config = from_dict(content, source=name)
    assert config.strategy.axes.world > 1
    report = verify_file(config)
    assert report.ok, report.failures
