"""A small run with open axes, a machine for it, and what workers note of the strategy that they were told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.targets import note
from hyper_parallel import config as files
from hyper_parallel.cluster import Cluster, CollectiveTable, Device, Shared, Tier
from hyper_parallel.config import RunConfig
from hyper_parallel.launch import Worker
from hyper_parallel.planner.auto import entry
from hyper_parallel.planner.auto.entry import together
from hyper_parallel.train import Trainer

GIB = float(1 << 30)


def device(gib: float = 8.0) -> Device:
    """A slow device without tables."""
    return Device("slow", {"float32": 5e10}, {"float32": 5e9}, Tier("device", gib * GIB, 1e10, 1e10), 5e-6)


def machine(workers: int = 4, gib: float = 8.0) -> Cluster:
    """As `calibrate` leaves one whose workers share its cores."""
    points = ((4096.0, 1e-3), (4194304.0, 1e-2))
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    tables = tuple(
        CollectiveTable(kind, "node", n, points, latency=2e-4, bandwidth=5e8, residual=0.1)
        for n in range(2, workers + 1)
        for kind in kinds
    )
    return Cluster(device=device(gib), shared={workers: Shared(device(gib), tables)}, name="this-machine")


def run_file(folder: Path, strategy: Any = "auto", heads: int = 4, **sections: Any) -> RunConfig:
    """A two-layer Llama. `sections` are merged into the file's, one level deep."""
    data: dict[str, Any] = {
        "version": 1,
        "out": str(folder / "run"),
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": heads,
                "num_key_value_heads": heads,
                "vocab_size": 512,
            }
        },
        "data": {"train": "unread", "sequence": 64},
        "train": {"batch": 8},
        "strategy": strategy,
        "launch": {"device": "cpu"},
    }
    for section, values in sections.items():
        data[section] = {**data.get(section, {}), **values}
    return files.from_dict(data)


def train(config: RunConfig, worker: Worker) -> None:
    """Settle what is open, train, and note how it went."""
    found = together(config, worker) if config.open else config
    trained = Trainer(found).run(worker)
    losses = [trained.initial_loss, trained.final_loss]
    micro = found.train.micro_batch
    note(config, worker.rank, laid=found.strategy.model_dump(mode="json"), micro=micro, losses=losses)


def train_by_itself(config: RunConfig, worker: Worker) -> None:
    """The same, with memory for one of the strategies that are tried at a time."""
    entry.SHARE = 0.0
    train(config, worker)


def settle(config: RunConfig, worker: Worker) -> None:
    """What a rank takes for the run's strategy."""
    found = together(config, worker)
    note(config, worker.rank, axes=found.strategy.model_dump()["axes"], micro=found.train.micro_batch)
