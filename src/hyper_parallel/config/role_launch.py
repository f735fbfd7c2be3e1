"""The config of a group of workers that a controller drives (`launch.roles`)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from hyper_parallel.config.launch import LaunchConfig
from hyper_parallel.config.launched import Wording
from hyper_parallel.strategy import Strategy
from hyper_parallel.strategy.section import PathText, Section


class RoleLaunch(Section):
    """One group: its host object, its workers and their devices. The controller writes it, workers read it as JSON."""

    wording: ClassVar = Wording(
        stopping="the controller ends the workers",
        safe="committed checkpoints are safe",
        resume="run the same command again: it continues from the last committed checkpoint",
    )

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_-]*$", max_length=60)]
    """The group's name, in messages and in its logs' names."""
    out: PathText
    """The run's folder; the workers' logs are `logs/<name>-<rank>.log` in it."""
    host: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    """``package.module:Class``: called with this config and the `Worker` on every rank. The methods of what it returns
    are the operations that the controller may call.
    """
    settings: dict[str, Any] = Field(default_factory=dict)
    """For the host object; values as in JSON."""
    launch: LaunchConfig = LaunchConfig()
    """How the workers are started. `threads` should be stated: groups that run at once share the machine's cores."""
    strategy: Strategy = Strategy()
    """How the group's model is spread over its workers; the product of its axes is their number."""
    devices: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=4096)] = ()
    """This machine's devices for the workers, by rank. Empty: the first ones."""
    model_type: str | None = None
    """The Transformers family, whose code is imported before the workers are forked."""

    @model_validator(mode="after")
    def _each_worker_has_a_device(self) -> RoleLaunch:
        if self.open:
            raise ValueError("'strategy' of a group states every axis; replace 'auto' by degrees")
        world = self.effective_strategy.world
        if self.devices and len(self.devices) != world:
            raise ValueError(
                f"'devices' names {len(self.devices)} devices for {world} workers of group {self.name!r}; name one "
                "for each worker"
            )
        return self

    @property
    def keeps_logs(self) -> bool:
        """They stay in the run's folder."""
        return True

    @property
    def open(self) -> bool:
        """Whether an axis or a budget is left to the planner, which is refused."""
        return self.strategy.open

    @property
    def effective_strategy(self) -> Strategy:
        """The one that runs: the declared one."""
        return self.strategy
