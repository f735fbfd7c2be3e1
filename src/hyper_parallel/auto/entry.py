"""What each worker of a run with open axes runs: settle the strategy together, then train."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from hyper_parallel.auto import kept
from hyper_parallel.auto.choose import choose
from hyper_parallel.auto.machine import machine_of
from hyper_parallel.auto.settled import settled
from hyper_parallel.compat.store import told_by_rank_0
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import ConfigError, HyperParallelError
from hyper_parallel.launch import Worker
from hyper_parallel.train.entry import main as train

log = logging.getLogger(__name__)

TARGET = f"{__name__}:main"
"""How `launch.run` is told of `main`."""
_KEY = "hyper_parallel/strategy"


def main(config: RunConfig, worker: Worker) -> None:
    """Train what `config` declares, with the strategy that rank 0 chooses."""
    train(together(config, worker), worker)


def together(config: RunConfig, worker: Worker) -> RunConfig:
    """The run with its strategy, the same on every rank. Each raises what rank 0 finds wrong."""
    text = None
    if worker.rank == 0:
        try:
            text = json.dumps({"laid": _laid(config, worker)})
        except HyperParallelError as error:
            text = json.dumps({"error": str(error)})
    told = json.loads(told_by_rank_0(_KEY, text))
    if "error" in told:
        raise ConfigError(told["error"])
    return settled(config, told["laid"])


def _laid(config: RunConfig, worker: Worker) -> object:
    """What rank 0 finds, says, and writes to the run's folder."""
    laid, said = kept.kept(config, worker.world)
    if said:
        _say(said)
    if laid is not None:
        return laid
    found = choose(config, machine_of(config, worker, _say), worker.world, _say)
    for line in found.lines:
        _say(line)
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    kept.write(out, found.laid, found.lines)
    return found.laid


def _say(text: str) -> None:
    """On the terminal, which rank 0 has, and in its log."""
    log.info("strategy: %s", text)
    print(f"strategy: {text}", flush=True)  # noqa: T201
