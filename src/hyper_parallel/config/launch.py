"""`launch` section: how the workers are started."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, FieldSerializationInfo, field_serializer, model_validator

from hyper_parallel.strategy.section import Section

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
