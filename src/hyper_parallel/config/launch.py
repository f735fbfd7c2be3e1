"""`launch` section: how the workers are started; the interface of configs that are handed to workers, and the config of
one role's group of workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field, FieldSerializationInfo, field_serializer, model_validator

from hyper_parallel.strategy import Strategy
from hyper_parallel.strategy.section import PathText, Section

DEVICE_WORDS = {"gpu": "cuda", "nvidia": "cuda", "rocm": "cuda", "ascend": "npu"}
"""Other words for a kind of device, with the one that `launch.device` takes."""


class LaunchConfig(Section):
    """The workers that the command starts on this machine. Under torchrun or Slurm it joins their workers
    instead.
    """

    workers: Annotated[int, Field(ge=1)] | None = None
    """Workers over all nodes. Default: the product of the strategy's axes. 1 is the one-device run: all axes
    of the strategy then count as 1.
    """
    nodes: Annotated[int, Field(ge=1)] = 1
    """Machines; each runs the same command with its own `node_rank`."""
    node_rank: Annotated[int, Field(ge=0)] = 0
    """This machine's index."""
    rendezvous: str = "127.0.0.1:0"
    """host:port of the first machine, where workers meet. Port 0 picks a free port, on one machine only.
    Nothing listens beyond loopback unless this names an address of another interface.
    """
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """The kind of device; `auto` takes the machine's accelerator, else the CPU."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads per worker. Default: the cores divided by the workers."""
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds without progress after which a run ends; the error names the rank that stopped first. Default:
    a minute, or 20 steps if that is longer. Compiling, saving and the like may take an hour, and longer while
    a worker computes.
    """
    grace: Annotated[float, Field(gt=0)] = 30
    """Seconds in which the workers must finish their step, save and end after a stop request (Ctrl-C,
    SIGTERM, SIGHUP); those that are left are then killed. It must cover a step and a save.
    """
    token: Annotated[str, Field(min_length=16)] | None = Field(default=None, repr=False)
    """A secret shared by all workers, with which each proves that it belongs to the run, for rendezvous
    beyond loopback. The variable HYPER_PARALLEL_TOKEN sets it without a file. It is never written to logs or
    checkpoints.
    """

    @field_serializer("token")
    def _keep_secret(self, token: str | None, info: FieldSerializationInfo) -> str | None:
        """Leaves the token out unless the config is handed to a worker: configs go into logs and checkpoints."""
        return token if isinstance(info.context, dict) and info.context.get("secrets") else None

    @model_validator(mode="after")
    def _nodes_fit(self) -> LaunchConfig:
        host, _, port = self.rendezvous.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise ValueError(
                f"'rendezvous' is host:port, for example 10.0.0.1:29500; got {self.rendezvous!r}"
            )
        if self.node_rank >= self.nodes:
            raise ValueError(f"'node_rank' ({self.node_rank}) must be below 'nodes' ({self.nodes})")
        if self.nodes > 1 and int(port) == 0:
            raise ValueError("on several nodes 'rendezvous' must state the port, for example 10.0.0.1:29500")
        if self.workers is not None and self.workers % self.nodes:
            raise ValueError(f"'workers' ({self.workers}) must be a multiple of 'nodes' ({self.nodes})")
        return self


@dataclass(frozen=True)
class Wording:
    """Parts of messages about the end of a run."""

    stopping: str
    """What the workers do after a request to stop."""
    safe: str = "committed checkpoints are safe"
    """What is not lost when they are killed."""
    resume: str = "run the same command again: it continues from the last committed checkpoint"
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


class RoleLaunch(Section):
    """One group: its host object, its workers and their devices. The controller writes it, workers read it as JSON."""

    wording: ClassVar = Wording(stopping="the controller ends the workers")

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
