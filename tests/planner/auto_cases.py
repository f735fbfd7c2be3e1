"""A small run with open axes, a machine for it, and what workers note of the strategy that they were told."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness.fork_server import fork_context
from harness.targets import note
from hyper_parallel import config as files
from hyper_parallel.cluster import Cluster, CollectiveTable, Device, Shared, Tier
from hyper_parallel.config import RunConfig
from hyper_parallel.launch import Worker, run
from hyper_parallel.planner.auto import entry, measure_candidates
from hyper_parallel.planner.auto.entry import together
from hyper_parallel.planner.auto.measure_candidates import tried
from hyper_parallel.train import Trainer

GIB = float(1 << 30)
_SERVER = "HYPER_PARALLEL_TESTS_FORK_SERVER"


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


def launched(config: RunConfig, target: str) -> int:
    """The exit code of a run whose workers call a function of this module."""
    fork_context()
    os.environ[_SERVER] = str(forkserver._forkserver._forkserver_address)  # type: ignore[attr-defined]
    return run(config, f"{__name__}:{target}")


def _cheap_trials() -> None:
    """In a worker: its trials and simulations are forks of the tests' server, which has imported what they need, and a
    trial has no more steps than it needs."""
    server = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address = os.environ[_SERVER]
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    server.ensure_running = resource_tracker.ensure_running
    measure_candidates.MOST = measure_candidates.LEAST


def left() -> list[int]:
    """How many processes this one has started that have not ended, and how many process groups there are."""
    return [len(multiprocessing.active_children()), len(dist.distributed_c10d._world.pg_map)]


def train(config: RunConfig, worker: Worker) -> None:
    """Settle what is open, train, and note how it went."""
    _cheap_trials()
    found = together(config, worker) if config.open else config
    after = left()
    trained = Trainer(found).run(worker)
    losses = [trained.initial_loss, trained.final_loss]
    micro = found.train.micro_batch
    laid = found.strategy.model_dump(mode="json")
    note(config, worker.rank, laid=laid, micro=micro, losses=losses, left=after)


def try_with_a_failure(config: RunConfig, worker: Worker) -> None:
    """Try two: one whose text rank 1 does not find, and the run's own."""
    missing = config
    if worker.rank == 1:
        missing = config.model_copy(update={"data": config.data.model_copy(update={"train": ["missing"]})})
    _try([missing, config], config, worker, 120.0)


def try_without_time(config: RunConfig, worker: Worker) -> None:
    """Try two in less than one takes."""
    _try([config, config], config, worker, 0.5)


def _try(runs: list[RunConfig], config: RunConfig, worker: Worker, limit: float) -> None:
    _cheap_trials()
    said: list[str] = []
    seconds = tried(runs, worker, at_once=True, seconds=limit, say=said.append)
    note(config, worker.rank, seconds=seconds, said="\n".join(said), left=left())


def train_by_itself(config: RunConfig, worker: Worker) -> None:
    """The same, with memory for one of the strategies that are tried at a time."""
    entry.SHARE = 0.0
    train(config, worker)


def settle(config: RunConfig, worker: Worker) -> None:
    """What a rank takes for the run's strategy."""
    found = together(config, worker)
    note(config, worker.rank, axes=found.strategy.model_dump()["axes"], micro=found.train.micro_batch)
