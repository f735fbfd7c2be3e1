"""Interface of configs that `launch` hands to workers: a training run's, or a generation's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from hyper_parallel.config.launch import LaunchConfig
from hyper_parallel.strategy import Strategy


@dataclass(frozen=True)
class Wording:
    """Parts of messages about the end of a run."""

    stopping: str
    """What the workers do after a request to stop."""
    safe: str
    """What is not lost when they are killed."""
    resume: str
    """How the run goes on after a failure."""
    kept: str | None = None
    """What has the results when standard output is lost and the run goes on. None: the output is the result."""


class Launched(Protocol):
    """A config that `launch.run` can hand to workers. It is a pydantic model, which they read again from JSON."""

    wording: ClassVar[Wording]

    @property
    def out(self) -> str:
        """The folder of the logs."""

    @property
    def keeps_logs(self) -> bool:
        """Whether the logs are there after the run."""

    @property
    def launch(self) -> LaunchConfig:
        """How the workers are started."""

    @property
    def strategy(self) -> Strategy:
        """As declared."""

    @property
    def effective_strategy(self) -> Strategy:
        """The one that runs."""

    @property
    def open(self) -> bool:
        """Whether the planner has to choose axes first."""

    @property
    def model_type(self) -> str | None:
        """The Transformers family, whose code is imported before the workers are forked."""

    def model_dump_json(self, *, context: Any) -> str:
        """The config as JSON, for the workers."""
