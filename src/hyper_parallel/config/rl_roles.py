"""`roles` section: which devices each role has, and how its model is spread over them.

With `split: auto` (in short `roles: auto`) the roles have no devices yet: these are split from measured times before
the run. What is written of strategies stays; the actor's open data axis takes the devices that are left over.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import Field, model_validator

from hyper_parallel.config.generate import GenerationStrategy
from hyper_parallel.config.rl_role import Devices, RewardRole, RoleConfig, RolloutRole, TrainedRole
from hyper_parallel.strategy import Axes, Strategy
from hyper_parallel.strategy.memory import Bytes
from hyper_parallel.strategy.section import Section


class WeightsConfig(Section):
    """How weights travel from the actor to a rollout that has a copy of them."""

    dtype: Literal["bfloat16"] | None = None
    """Round them to this on their way. Default: they travel in the narrower dtype of both sides."""
    delta: bool = False
    """Send only what has changed since the last version; exact. Both sides keep a copy of that version."""
    bucket_bytes: Annotated[int, Field(ge=8, strict=True)] = 32 * 2**20
    """The most bytes of one message."""


class SleepConfig(Section):
    """Where what roles that take turns on the same devices do not need goes, in the turns of the others."""

    host: Bytes | None = None
    """Host memory of each worker, at most. On a CPU this is the memory of the device, too: nothing is gained there."""
    flash: str | None = None
    """A folder on a fast disk, for what `host` has no room for. The files in it are removed when the run ends."""

    @model_validator(mode="after")
    def _goes_somewhere(self) -> SleepConfig:
        if self.host is None and self.flash is None:
            raise ValueError("set 'host' to a number of bytes, or 'flash' to a folder on a fast disk")
        return self


class Roles(Section):
    """The roles of a run. Those that are left out have the devices of the actor."""

    actor: TrainedRole = TrainedRole()
    """Trains."""
    rollout: RolloutRole = RolloutRole()
    """Generates."""
    reference: TrainedRole | None = None
    """Where the KL divergence is measured from; needed with `rl.kl` above 0. Default: as the actor."""
    reward: RewardRole | None = None
    """A model that scores answers, with `task.reward: model`."""
    weights: WeightsConfig = WeightsConfig()
    """How weights travel to the rollout (docs/rl-weights.md)."""
    sleep: SleepConfig | None = None
    """Offload what a role needs in its own turn only, where roles have the same devices: while answers are generated
    the optimizer, the critic, the reference, and the actor's weights where the rollout has its own; while the actor
    trains the KV cache, the reference and the rollout's own weights (the sleep mode of vLLM, `param_offload` and
    `optimizer_offload` of verl). Default: everything stays."""
    engine: Literal["local", "ray"] = "local"
    """Who starts the workers: this command on this machine, or Ray (an extra) on one or more (docs/roles.md)."""
    address: str | None = None
    """host:port of the Ray cluster to join. Default: one is started on this machine, and ends with the run."""
    restarts: Annotated[int, Field(ge=0, strict=True)] = 10
    """How often the workers of one group are started again after some were lost; then the run ends."""
    split: Literal["auto"] | None = None
    """`auto` (`roles: auto` in short): the devices of the actor and the rollout are chosen before the first step, from
    times that are measured on them: all devices take turns, or some train while the others generate. Written strategies
    stay; the actor's data axis (`shard`, or `replicate: auto`) takes what is left over."""
    devices: Annotated[int, Field(ge=1, le=4096, strict=True)] | None = None
    """Number of devices that `split: auto` may use. Default: `launch.workers`, or this machine's accelerators, or its
    cores where it has none."""

    @model_validator(mode="before")
    @classmethod
    def _in_short(cls, given: object) -> object:
        return {"split": "auto"} if given == "auto" else given

    @property
    def open(self) -> bool:
        """Whether the devices are still to be chosen."""
        return self.split is not None

    @model_validator(mode="after")
    def _split_or_written(self) -> Roles:
        named: dict[str, RoleConfig] = {"actor": self.actor, "rollout": self.rollout}
        if not self.open:
            if self.devices is not None:
                raise ValueError(
                    f"'devices' ({self.devices}) is the number that 'split: auto' may use; add that, or write the "
                    "devices of each role instead"
                )
            if self.reference is not None:
                named["reference"] = self.reference
            for name, role in named.items():
                if role.strategy is not None and role.strategy.open:
                    raise ValueError(
                        f"'{name}' has an axis that is auto, which only 'split: auto' fills in; write its degree"
                    )
            return self
        for name, role in named.items():
            if role.devices is not None:
                raise ValueError(
                    f"'split: auto' chooses the devices, and '{name}.devices' is written; leave one of them out"
                )
        if self.reference is not None:
            raise ValueError(
                "with 'split: auto' the reference is on the actor's workers; leave 'reference' out"
            )
        if self.reward is not None:
            raise ValueError(
                "'split: auto' does not place a reward model; write the devices of each role, or take another reward"
            )
        return self

    @property
    def actors(self) -> TrainedRole:
        """The actor, its devices filled in."""
        return _on(self.actor, tuple(range(self.actor.strategy.world)))

    @property
    def rollouts(self) -> RolloutRole:
        """The rollout, its devices and axes filled in."""
        role, actor = self.rollout, self.actors
        if role.strategy is None:
            shared = role.devices in (None, actor.placed)
            strategy = GenerationStrategy(axes=actor.strategy.axes) if shared else GenerationStrategy()
            role = role.model_copy(update={"strategy": strategy})
        return _on(role, actor.placed)

    @property
    def references(self) -> TrainedRole:
        """The reference, its devices filled in."""
        return self.actors if self.reference is None else _on(self.reference, self.actors.placed)

    @property
    def rewards(self) -> RewardRole | None:
        """The reward model's role, its devices and strategy filled in; None where there is none."""
        role, actor = self.reward, self.actors
        if role is None:
            return None
        devices = role.devices or actor.placed
        if role.strategy is None:
            spread = Strategy(axes=Axes(replicate=len(devices)))
            if devices == actor.placed:
                spread = Strategy(axes=actor.strategy.axes, precision=actor.strategy.precision)
            role = role.model_copy(update={"strategy": spread})
        return _on(role, devices)

    @model_validator(mode="after")
    def _address_is_ray(self) -> Roles:
        if self.address is not None and self.engine != "ray":
            raise ValueError("'address' is that of a Ray cluster; set 'engine' to ray, or leave it out")
        return self

    @model_validator(mode="after")
    def _groups_are_apart(self) -> Roles:
        if self.open:
            return self
        actor, rollout, reference = self.actors, self.rollouts, self.references
        worlds = {"rollout": rollout.spread.world, "reference": reference.strategy.world}
        for name, role in (("rollout", rollout), ("reference", reference)):
            world = worlds[name]
            fits = len(role.placed) == world or (name == "rollout" and role.placed != actor.placed)
            if not fits or len(role.placed) % world:
                raise ValueError(
                    f"'{name}' has {len(role.placed)} devices, and its axes multiply to {world}; on the actor's "
                    "devices make them equal (with replicate, for copies)"
                )
            for other, devices in (("actor", actor.placed), ("rollout", rollout.placed)):
                if role.placed != devices and set(role.placed) & set(devices):
                    raise ValueError(
                        f"'{name}' and '{other}' share some of their devices; give them the same ones, or none in "
                        "common"
                    )
        if self.reference is not None and reference.placed == rollout.placed != actor.placed:
            raise ValueError(
                "'reference' and 'rollout' have the same devices; give it the actor's, or its own"
            )
        return self

    @model_validator(mode="after")
    def _reward_is_apart(self) -> Roles:
        if self.reward is None:
            return self
        role, actor = self.rewards, self.actors
        assert role is not None
        if len(role.placed) != role.spread.world:
            raise ValueError(
                f"'reward' has {len(role.placed)} devices, and its axes multiply to {role.spread.world}; make them "
                "equal (with replicate, for copies), or leave 'strategy' out"
            )
        if role.placed == actor.placed:
            return self
        for name, other in (("actor", actor), ("rollout", self.rollouts), ("reference", self.references)):
            if set(role.placed) & set(other.placed):
                raise ValueError(
                    f"'reward' and '{name}' share devices; give the reward model all of the actor's, or its own"
                )
        return self


Role = TypeVar("Role", bound=RoleConfig)


def _on(role: Role, devices: Devices) -> Role:
    return role if role.devices is not None else role.model_copy(update={"devices": devices})
