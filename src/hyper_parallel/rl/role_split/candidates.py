"""Layouts of the roles that `split: auto` chooses between, as the run's written strategies allow.

    together    actor and rollout on the same devices, by turns; the rollout has a copy of the model on each `engine`
    apart       some devices train while the others generate

The actor's open data axis takes its devices: degree = devices / (product of the written axes). A number of devices is
allowed if that is whole and the batch of an update is shared evenly by the ranks that see different rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hyper_parallel.config.generate import GenerationStrategy
from hyper_parallel.config.rl_role import DATA_AXES
from hyper_parallel.config.rl_roles import Roles
from hyper_parallel.config.rl_run import RLConfig
from hyper_parallel.errors import ConfigError
from hyper_parallel.launch.world import devices_here


@dataclass(frozen=True, kw_only=True)
class RoleLayout:
    """Numbers of devices."""

    together: bool
    """Whether the roles take turns on the same devices."""
    rollout: int
    train: int

    @property
    def words(self) -> str:
        """As a line has it."""
        one = "s" * (self.train == 1)
        if self.together:
            return f"{_devices(self.train)} train{one} and generate{one} in turn"
        return f"{_devices(self.train)} train{one}, {self.rollout} generate{'s' * (self.rollout == 1)}"


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """All layouts that may be chosen."""

    devices: int
    """That there are."""
    engine: int
    """Devices of a copy of the rollout."""
    together: RoleLayout | None
    """On as many devices as possible."""
    apart: tuple[RoleLayout, ...]
    """One for each number of devices that may train, the fewest first."""


def candidates_of(config: RLConfig) -> Candidates:
    """The layouts of a run with `split: auto`. Raises ConfigError where there is none."""
    devices, engine = device_count(config), _engine(config).world
    sizes = [count for count in range(1, devices + 1) if _actor_on(config, count) is not None]
    both = [count for count in sizes if count % engine == 0]
    together = RoleLayout(together=True, rollout=both[-1], train=both[-1]) if both else None
    apart = tuple(
        RoleLayout(together=False, rollout=rollout, train=train)
        for train in sizes
        if (rollout := (devices - train) // engine * engine)
    )
    if together is None and not apart:
        least = config.roles.actor.strategy.world
        raise ConfigError(
            f"roles: 'split: auto' has {devices} devices, the actor's written axes take {least} and a copy of the "
            f"rollout {engine}; give more with roles.devices, or write smaller degrees (an update's answers, "
            f"{config.rl.answers // config.rl.minibatches}, are shared evenly by the actor's replicate · shard)"
        )
    return Candidates(devices=devices, engine=engine, together=together, apart=apart)


def device_count(config: RLConfig) -> int:
    """How many devices `split: auto` may use. Raises ConfigError where nobody says so."""
    given = config.roles.devices or config.launch.workers
    if given is not None:
        return given
    if config.roles.engine == "ray":
        raise ConfigError(
            "roles: 'split: auto' does not know the devices of a Ray cluster; set roles.devices to their number"
        )
    return devices_here(config.launch)[0]


def roles_of(config: RLConfig, layout: RoleLayout) -> Roles:
    """The roles of a run with the devices of a layout written out. Raises ConfigError where they do not go together."""
    actor = _actor_on(config, layout.train)
    data = config.roles.model_dump(mode="json")
    engine = _engine(config)
    axes = engine.axes.model_dump(mode="json")
    first = 0 if layout.together else layout.train
    if layout.together:
        if config.roles.rollout.strategy is None:
            # In the order of the actor's axes, so that equal degrees are equal axes, and the model is shared.
            axes = dict.fromkeys(config.roles.actor.strategy.axes.model_dump(mode="json"), 1)
        axes["replicate"] *= layout.rollout // engine.world
    if actor is None or layout.rollout % engine.world:
        raise ConfigError(
            f"roles: {layout.words} does not go with the strategies that are written; put 'roles' and rl.prompts back, "
            "or have the split chosen anew"
        )
    data |= {"split": None, "devices": None}
    if not layout.together and not config.rl.kl:
        data["sleep"] = None  # no roles take turns
    data["actor"] |= {"devices": list(range(layout.train)), "strategy": actor}
    data["rollout"] |= {
        "devices": list(range(first, first + layout.rollout)),
        "strategy": {**engine.model_dump(mode="json"), "axes": axes},
    }
    return Roles.model_validate(data)


def _engine(config: RLConfig) -> GenerationStrategy:
    """Of one copy of the rollout; the default is one device."""
    return config.roles.rollout.strategy or GenerationStrategy()


def _actor_on(config: RLConfig, devices: int) -> dict[str, Any] | None:
    """The actor's strategy on this number of devices; None where that is not allowed."""
    strategy = config.roles.actor.strategy
    axes = strategy.axes
    opened = axes.open[0] if axes.open else DATA_AXES[0] if axes.data == 1 else None
    written, degree = axes.world, 1
    if opened is None:
        if devices != written:
            return None
    else:
        degree = devices // written
        if devices % written or (config.rl.answers // config.rl.minibatches) % (axes.data * degree):
            return None
    settled = ("chosen", "cluster", "tries", "tries_seconds")
    data = {key: value for key, value in strategy.model_dump(mode="json").items() if key not in settled}
    if opened is not None:
        data["axes"] = {**data["axes"], opened: degree}
    spans = (data["axes"][axis] for axis in ("shard", "context", "tensor_y", "tensor_x"))
    span = 1
    for one in spans:
        span *= one
    return data if span % axes.expert == 0 else None


def _devices(count: int) -> str:
    return f"{count} device{'s' * (count != 1)}"
