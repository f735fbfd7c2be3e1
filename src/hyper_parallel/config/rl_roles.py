"""`roles` section: which devices each role has, and how its model is spread over them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator, model_validator

from hyper_parallel.config.generate import GenerationStrategy
from hyper_parallel.strategy import Strategy
from hyper_parallel.strategy.section import Section

Devices = tuple[Annotated[int, Field(ge=0, strict=True)], ...]


def _expanded(given: object) -> object:
    """Numbers of devices from 3, [0, 1] or '0-3'."""
    if isinstance(given, int) and not isinstance(given, bool):
        return (given,)
    if isinstance(given, str):
        first, dash, last = given.partition("-")
        if first.isdigit() and (last.isdigit() if dash else True):
            return tuple(range(int(first), int(last if dash else first) + 1))
        raise ValueError(f"is a number, a list of numbers or a range such as 0-3; got {given!r}")
    return given


class RoleConfig(Section):
    """One role: its devices, counted over all roles, and its strategy."""

    devices: Devices = (0,)
    """Numbers of devices (on a CPU, of worker processes): a number, a list, or a range such as `0-3`. Roles with the
    same devices take turns on them; others run at the same time."""
    strategy: Strategy = Strategy()
    """How the model is spread over the devices."""
    threads: Annotated[int, Field(ge=1, strict=True)] | None = None
    """CPU threads of each worker. Default: `launch.threads`, or the cores divided by all workers."""

    _devices = field_validator("devices", mode="before")(_expanded)

    @field_validator("devices")
    @classmethod
    def _once(cls, given: Devices) -> Devices:
        if not given or len(set(given)) != len(given):
            raise ValueError("names each device once, and at least one")
        return given


class ActorRole(RoleConfig):
    """The model that is trained."""

    @model_validator(mode="after")
    def _runs(self) -> ActorRole:
        axes = self.strategy.axes
        if self.strategy.open:
            raise ValueError("'strategy: auto' is not planned for an actor; write the degrees of its axes")
        if axes.pipeline > 1 or axes.context > 1 or self.strategy.submodels:
            raise ValueError("an actor runs under replicate, shard, tensor and expert; leave the others out")
        if len(self.devices) != self.strategy.world:
            raise ValueError(
                f"the axes multiply to {self.strategy.world}, and the devices are {len(self.devices)}; make them equal"
            )
        return self


class RolloutRole(RoleConfig):
    """The model that answers prompts, once or several times."""

    strategy: GenerationStrategy = GenerationStrategy()  # type: ignore[assignment]
    """How one copy of the model is spread; as many copies run as the devices hold, each for itself."""
    batch: Annotated[int, Field(ge=1, strict=True)] = 64
    """Answers that a copy generates at once, at most."""
    page: Annotated[int, Field(ge=16, multiple_of=16, strict=True)] = 32
    """Tokens of a page of the KV cache."""

    @model_validator(mode="after")
    def _runs(self) -> RolloutRole:
        if self.strategy.axes.context > 1:
            raise ValueError("'axes.context' is for long prompts of `generate`; leave it out of a rollout")
        if len(self.devices) % self.strategy.world:
            raise ValueError(
                f"a copy needs {self.strategy.world} devices, which does not divide the {len(self.devices)} named"
            )
        return self


class Roles(Section):
    """The roles of a run. Those that are left out have the devices of the actor."""

    actor: ActorRole = ActorRole()
    """Trains."""
    rollout: RolloutRole | None = None
    """Generates. Default: on the actor's devices, with its axes."""
    reference: ActorRole | None = None
    """Where the KL divergence is measured from; needed with `rl.kl` above 0. Default: on the actor's devices."""

    restarts: Annotated[int, Field(ge=0, strict=True)] = 10
    """How often the workers of one group are started again after some were lost; then the run ends."""

    @property
    def rollouts(self) -> RolloutRole:
        """The rollout's section, its default filled in."""
        if self.rollout is not None:
            return self.rollout
        axes = self.actor.strategy.axes
        return RolloutRole(devices=self.actor.devices, strategy=GenerationStrategy(axes=axes))

    @property
    def references(self) -> ActorRole:
        """The reference's section, its default filled in."""
        return self.reference or self.actor

    @model_validator(mode="after")
    def _groups_are_apart(self) -> Roles:
        actor, rollout = self.actor.devices, self.rollouts.devices
        for name, own in (("rollout", rollout), ("reference", self.references.devices)):
            for other, devices in (("actor", actor), ("rollout", rollout)):
                if own != devices and set(own) & set(devices):
                    raise ValueError(
                        f"'{name}' and '{other}' share some of their devices; give them the same ones, or none in "
                        "common"
                    )
        return self
