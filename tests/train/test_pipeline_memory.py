"""Tensor parallelism with a pipeline holds less than with copies of the model on as many devices: on real workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny_run import LLAMA, run, run_config

from harness import run_ranks
from harness.observer import Observer
from hyper_parallel.step.graph_executor import GraphStepper
from hyper_parallel.step.train_step import Stepper

WIDE = {**LLAMA, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4}
MODELS: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "gemma2": {**WIDE, "model_type": "gemma2", "head_dim": 16},
}
WAYS = {"copies": {"replicate": 2, "tensor": 2}, "pipeline": {"pipeline": 2, "tensor": 2}}


@contextmanager
def _peaks() -> Iterator[list[int]]:
    """Gets the most that an observer sees alive, who knows nothing of a plan, in each step."""
    peaks: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        for stepper in (Stepper, GraphStepper):
            original = stepper.run

            def watched(self: Any, *args: Any, _original: Any = original, **named: Any) -> Any:
                with Observer([]) as observer:
                    result = _original(self, *args, **named)
                peaks.append(observer.peak)
                return result

            patch.setattr(stepper, "run", watched)
        yield peaks


def _run(rank: int, world: int, folder: Path) -> list[list[int]]:
    return [[_peak(folder, name, way) for way in WAYS] for name in MODELS]


def _peak(folder: Path, name: str, way: str) -> int:
    sections = {
        "model": {"config": MODELS[name]},
        "strategy": {"axes": WAYS[way]},
        "train": {"steps": 2, "micro_batch": 1, "sample": False, "eval": {"batches": 1}},
    }
    with _peaks() as peaks:
        run(run_config(folder, f"{name}-{way}", **sections))
    assert len(peaks) == 2
    return max(peaks)


def test_a_pipeline_divides_what_copies_repeat(tmp_path: Path) -> None:
    of_ranks: list[list[list[int]]] = run_ranks(_run, 4, tmp_path, timeout=400.0)
    for at, name in enumerate(MODELS):
        copies, pipeline = (max(rank[at][way] for rank in of_ranks) for way in range(len(WAYS)))
        print(f"{name}: {pipeline:,} bytes with a pipeline, {copies:,} with copies")
        assert pipeline <= 0.8 * copies, name
