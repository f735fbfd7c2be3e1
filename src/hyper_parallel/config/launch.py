"""How the workers are started."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, FieldSerializationInfo, field_serializer, model_validator

from hyper_parallel.strategy.section import Section


class LaunchConfig(Section):
    """Local workers that the command starts itself. Under torchrun or Slurm it joins their workers instead."""

    workers: Annotated[int, Field(ge=1)] | None = None
    """Workers over all nodes. Left out: as many as the strategy's axes multiply to. 1 is the one-device run:
    the strategy's axes are then read as all 1."""
    nodes: Annotated[int, Field(ge=1)] = 1
    """Machines; each runs the same command with its own `node_rank`."""
    node_rank: Annotated[int, Field(ge=0)] = 0
    """This machine's index."""
    rendezvous: str = "127.0.0.1:0"
    """host:port of the first machine, where workers meet. Port 0 picks a free one, on one machine only.
    Nothing listens beyond loopback unless an address of another interface stands here."""
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """The kind of device; `auto` takes the accelerator that is there, else the CPU."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """Threads a worker computes with on the CPU. Left out: the cores divided by the workers."""
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds without progress after which a run ends, with the rank named that stopped first. Left out: a minute, or
    20 steps if that is longer. Compiling, saving and the like have an hour, and as long as a worker computes."""
    grace: Annotated[float, Field(gt=0)] = 30
    """Seconds that the workers have to finish their step, save and end after a request to stop (Ctrl-C, SIGTERM,
    SIGHUP); what is left of them is then killed. It must cover a step and a save."""
    token: Annotated[str, Field(min_length=16)] | None = Field(default=None, repr=False)
    """A secret that all workers are given, so that each can prove that it belongs to the run, for rendezvous beyond
    loopback. The variable HYPER_PARALLEL_TOKEN does the same without a file. It is never written to logs or
    checkpoints."""

    @field_serializer("token")
    def _keep_secret(self, token: str | None, info: FieldSerializationInfo) -> str | None:
        """A config goes into logs and checkpoints; only what hands it to a worker asks for the token."""
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
