"""Every key of a generation file is read on the way of `generate`, or refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.key_reads import ignored_keys, key_reads
from harness.ranks import run_ranks
from harness.small_folder import save_small_llama
from hyper_parallel.cli.generate import _answer, _on_workers
from hyper_parallel.compat import backend
from hyper_parallel.config.generate import (
    GenerateConfig,
    GenerateRun,
    for_workers,
    load_generation,
    load_plan,
)
from hyper_parallel.config.inference import GenerationWorkload, Inference
from hyper_parallel.errors import ConfigError
from hyper_parallel.inference.worker import main
from hyper_parallel.launch import Worker

MODEL = "Llama-3.1-405B"
ROOTS: Any = {
    GenerateConfig: {},
    GenerateRun: {},
    # The generator makes its own of the file's keys.
    Inference: {key: f"inference.{key}" for key in Inference.model_fields},
}
_PREDICTED = (
    "model.config",
    "model.path",
    *(f"workload.{key}" for key in GenerationWorkload.model_fields),
)
_LAUNCHED = ("workers", "nodes", "node_rank", "timeout", "grace", "token")
ELSEWHERE = {
    "version": "of the format: the loader has it",
    "strategy.version": "likewise",
    "strategy.placement.collectives": "of axes that span levels (tests/placement)",
    "logs": "the folder that a command with workers names as theirs",
    **dict.fromkeys(
        _PREDICTED, "of the file that `simulate --generate` reads (docs/inference-predictions.md)"
    ),
    **{f"launch.{key}": "by `launch.run`, as for every command (tests/launch)" for key in _LAUNCHED},
}
"""Keys that these runs do not read, with the reason."""


def reads(rank: int, world: int, data: dict[str, Any], folder: str) -> set[str]:
    with key_reads(ROOTS) as read:
        config = GenerateConfig.model_validate(data)
        if _on_workers(config):
            run = for_workers(config, out=folder, folder=folder, prompt="12")
            worker = Worker(rank, rank, world, world, torch.device("cpu"), backend("cpu"))
            main(GenerateRun.model_validate(run.model_dump(mode="json")), worker)
        else:
            _answer(Path(folder), "12", None, config)
    return read


def test_every_key_is_read_or_refused(tmp_path: Path) -> None:
    save_small_llama(tmp_path)
    inference = {
        "temperature": 1.0,
        "top_k": 5,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "max_tokens": 4,
        "page": 16,
    }
    memory = {"device": "64MiB", "host": "64MiB", "flash": str(tmp_path / "flash")}
    pool = {"device": "64MiB", "pool": "64MiB"}
    launch = {"device": "cpu", "threads": 1}
    one = {"version": 1, "inference": inference, "strategy": {"memory": memory}, "launch": launch}
    spread = {"axes": {"tensor": 2}, "memory": pool}
    two = {"version": 1, "inference": {**inference, "n": 2}, "strategy": spread, "launch": launch}
    folder = str(tmp_path / "model")
    read = run_ranks(reads, 1, one, folder)[0] | run_ranks(reads, 2, two, folder)[0]
    assert "inference.page" in read, "reads are seen"
    ignored = ignored_keys(GenerateConfig, {"version": 1}, read | ELSEWHERE.keys())
    assert not ignored, "\n".join(ignored)


@pytest.mark.parametrize(
    "key", ["overlap={schedule: none}", "sequence=true", "precision={compute: bfloat16}"]
)
def test_predictions_and_plans_refuse_keys_of_training(key: str) -> None:
    for load in (lambda given: load_generation(MODEL, given), load_plan):
        with pytest.raises(ConfigError, match=key.partition("=")[0]):
            load([f"strategy.{key}"])


def test_a_model_that_generates_has_no_adapter_and_no_attention() -> None:
    for key, line in (
        ("adapter={rank: 4}", "'adapter' is trained"),
        ("attention=eager", "'attention' is for training"),
    ):
        with pytest.raises(ConfigError, match=line):
            load_generation("llama-3-8b", [f"model.{key}"])
