"""From the names in the run file to trackers; others register their own under a name."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

from hyper_parallel.errors import ConfigError, nearest
from hyper_parallel.train.trackers.jsonl import MetricsFile, Record, RunInfo, Tracker, Trackers


class MLflow:
    """A run of the experiment `hyper-parallel`, on the server that MLFLOW_TRACKING_URI names."""

    def __init__(self, run: RunInfo) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise ConfigError(
                "trackers: 'mlflow' is not installed; pip install 'hyper-parallel[mlflow]', or leave it out"
            ) from error
        self._mlflow = mlflow
        mlflow.set_experiment("hyper-parallel")
        known = run.out / "mlflow-id"
        identity = known.read_text().strip() if run.start and known.exists() else None
        active = mlflow.start_run(run_id=identity, run_name=None if identity else run.out.name)
        known.write_text(active.info.run_id)
        if identity is None:
            mlflow.log_dict(run.config, "run.json")

    def log(self, step: int, record: Record) -> None:
        """The record at its step."""
        self._mlflow.log_metrics(dict(record), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        """The text, as an artifact."""
        self._mlflow.log_text(text, f"{name}.txt")

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


class TensorBoard:
    """Scalars under their metrics' names. A resume tells TensorBoard to forget the steps that it does again."""

    def __init__(self, run: RunInfo) -> None:
        # TensorBoard would look for TensorFlow, which takes seconds where it is installed and is not used.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        from torch.utils.tensorboard import SummaryWriter

        self.folder = run.out / "tensorboard"
        purge = run.start + 1 if run.start or self.folder.exists() else None
        self._writer = SummaryWriter(str(self.folder), purge_step=purge)

    def log(self, step: int, record: Record) -> None:
        """A scalar for each value, under `train/` or, for an evaluation's, `eval/`."""
        for name, value in record.items():
            tag = f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
            self._writer.add_scalar(tag, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        """The text, as a code block."""
        self._writer.add_text(name, f"```\n{text}\n```", step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandB:
    """A run of the project `hyper-parallel`; everything else is set by wandb's own environment variables."""

    def __init__(self, run: RunInfo) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "trackers: 'wandb' is not installed; pip install 'hyper-parallel[wandb]', or leave it out"
            ) from error
        known = run.out / "wandb-id"
        identity = known.read_text().strip() if run.start and known.exists() else None
        self._run = wandb.init(
            project="hyper-parallel",
            name=run.out.name,
            dir=str(run.out),
            config=run.config,
            id=identity,
            resume="allow" if identity else None,
        )
        known.write_text(self._run.id)

    def log(self, step: int, record: Record) -> None:
        """The record at its step; wandb itself drops steps that a resume does again."""
        self._run.log(dict(record), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        """The text, in the run's summary."""
        self._run.summary[name] = text

    def close(self) -> None:
        """End the run."""
        self._run.finish()


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
