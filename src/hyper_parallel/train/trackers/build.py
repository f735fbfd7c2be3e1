"""From the names in the run file to trackers; others register their own under a name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

from hyper_parallel.errors import ConfigError, nearest
from hyper_parallel.train.trackers.jsonl import MetricsFile
from hyper_parallel.train.trackers.mlflow import MLflow
from hyper_parallel.train.trackers.tensorboard import TensorBoard
from hyper_parallel.train.trackers.tracker import RunInfo, Tracker, Trackers
from hyper_parallel.train.trackers.wandb import WandB

Factory = Callable[[RunInfo], Tracker]

GROUP = "hyper_parallel.trackers"
"""The entry-point group in which other distributions name their factories."""

_factories: dict[str, Factory] = {}


def register_tracker(name: str, factory: Factory) -> None:
    """Make `factory` the tracker called `name`; a later registration replaces an earlier one."""
    _factories[name] = factory


def build_trackers(names: Sequence[str], run: RunInfo) -> Trackers:
    """`metrics.jsonl` and the trackers in `names`, opened.

    Raises ConfigError for a name that nobody registered and for one whose package is not installed.
    """
    return Trackers([MetricsFile(run), *(_factory(name)(run) for name in names)])


def _factory(name: str) -> Factory:
    factory = _factories.get(name)
    if factory is None:
        for entry in entry_points(group=GROUP, name=name):
            factory = entry.load()
    if factory is None:
        known = sorted({*_factories, *(entry.name for entry in entry_points(group=GROUP))})
        raise ConfigError(
            f"trackers: no tracker is called {name!r}; there are {', '.join(known)}{nearest(name, known)}"
        )
    return factory


register_tracker("tensorboard", TensorBoard)
register_tracker("wandb", WandB)
register_tracker("mlflow", MLflow)
