"""One run by both engines, and what they came to."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny_run import metrics, run, run_config
from torch import nn

TRAIN: dict[str, Any] = {
    "steps": 20,
    "batch": 8,
    "micro_batch": 4,
    "optimizer": {"name": "adamw", "lr": 3e-3},
    "clip": 0.9,  # the first norms are below it and the later ones above
    "eval": {"batches": 1},
    "sample": {"tokens": 0},
}
STEPS = 6
"""Of two runs that are compared: what one step leaves wrong is read by the next ones."""
METRICS = ("loss", "grad_norm", "loss_tokens", "eval_loss")


@dataclass
class Ran:
    """What one rank saw of a run."""

    metrics: dict[str, dict[int, float]]
    """By name and step; of rank 0 only."""
    tensors: dict[str, torch.Tensor]
    """What this rank wrote into the last checkpoint: parameters, buffers and optimizer state."""
    notes: list[str]
    """What the graphs and the engine said."""


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.notes.append(record.getMessage())


def run_engine(
    rank: int,
    folder: Path,
    name: str,
    engine: str,
    sections: dict[str, Any],
    model: Callable[[], nn.Module] | None = None,
) -> Ran:
    """Run with `engine` on this process's rank."""
    train = {**TRAIN, **sections.get("train", {}), "engine": engine}
    config = run_config(folder, f"{name}-{engine}", **{**sections, "train": train})
    heard, logger = _Heard(), logging.getLogger("hyper_parallel")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(heard)
    try:
        summary = run(config, model() if model is not None else None)
    finally:
        logger.removeHandler(heard)
        logger.setLevel(level)
    data = Path(summary.checkpoint or config.out) / f"rank-{rank:05d}.safetensors"
    found = {metric: metrics(config, metric) for metric in METRICS} if rank == 0 else {}
    return Ran(found, load_file(data) if data.exists() else {}, heard.notes)


def few(sections: dict[str, Any], steps: int = STEPS) -> dict[str, Any]:
    """The sections of a run of so many steps, where they name no number."""
    return {**sections, "train": {"steps": steps, **sections.get("train", {})}}


def both(rank: int, folder: Path, name: str, sections: dict[str, Any], **more: Any) -> tuple[Ran, Ran]:
    """The run by the graph and eagerly, of `STEPS` steps where the sections name no number."""
    sections = few(sections)
    return (
        run_engine(rank, folder, name, "graph", sections, **more),
        run_engine(rank, folder, name, "eager", sections, **more),
    )


def differences(graph: Ran, eager: Ran) -> dict[str, float]:
    """Metric or tensor to the largest absolute difference, of those that are not equal to the bit."""
    assert graph.tensors.keys() == eager.tensors.keys()
    found = {
        name: (tensor.double() - eager.tensors[name].double()).abs().max().item()
        for name, tensor in graph.tensors.items()
        if not torch.equal(tensor, eager.tensors[name])
    }
    for metric, values in graph.metrics.items():
        apart = [abs(value - eager.metrics[metric][step]) for step, value in values.items()]
        if values != eager.metrics[metric]:
            found[metric] = max(apart)
    return found


def of_graph(ran: Ran) -> bool:
    """Whether the run's steps were those of graphs, all of them."""
    return any("the step as a graph" in note for note in ran.notes) and not any(
        "eagerly" in note for note in ran.notes
    )


def packed_text(folder: Path) -> dict[str, Any]:
    """A data section: long documents and short ones, so that some rows hold several and others one."""
    path = folder / "packed.jsonl"
    long = Path(json.__file__).read_text()[:6000]
    texts = [long[at : at + 300] for at in range(0, 6000, 300)]
    texts += [f"def f{at}(x): return x + {at}" for at in range(40)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {"train": str(path), "eval": str(path)}
