"""Weights & Biases tracker; a resumed run continues the same W&B run."""

from __future__ import annotations

from hyper_parallel.errors import ConfigError
from hyper_parallel.train.trackers.tracker import Record, RunInfo


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
