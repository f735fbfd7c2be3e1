"""Worker entry of `hyper-parallel train`."""

from __future__ import annotations

from hyper_parallel.config import RunConfig
from hyper_parallel.launch import Worker
from hyper_parallel.train.trainer import Trainer

TARGET = f"{__name__}:main"
"""The target that `launch.run` calls on every rank."""


def main(config: RunConfig, worker: Worker) -> None:
    """Train what `config` declares, as one of its workers."""
    Trainer(config).run(worker)
