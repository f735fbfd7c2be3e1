"""Layouts of the roles that `split: auto` chooses between, their measured times, and the simulation that these make.

    together    actor and rollout on the same devices, by turns; the rollout has a copy of the model on each `engine`
    apart       some devices train while the others generate

The actor's open data axis takes its devices: degree = devices / (product of the written axes). A number of devices is
allowed if that is whole and the batch of an update is shared evenly by the ranks that see different rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.config.generate import GenerationStrategy
from hyper_parallel.config.rl import RLConfig
from hyper_parallel.config.rl_roles import DATA_AXES, Roles
from hyper_parallel.config.rl_simulation import GenerationTime, Lengths, RlSimulation, RoleTime
from hyper_parallel.errors import ConfigError
from hyper_parallel.launch.rendezvous import devices_here
from hyper_parallel.rl.simulator.scaling import least_squares


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
        data["rollout"]["threads"] = None  # the actor's workers have its own
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


def on_layout(config: RLConfig, layout: RoleLayout) -> RLConfig:
    """The run with the devices of a layout written out: their number, `launch.workers`, is in the roles then."""
    launch = config.launch.model_copy(update={"workers": None})
    return config.model_copy(update={"roles": roles_of(config, layout), "launch": launch})


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


# Measured times of the roles, and the simulation that they make.
#
# A wave is a number of answers that engines generate from start to end, all begun at once. With m_j the longest and t_j
# all tokens of engine j, whose passes take p + k s seconds for k running answers,
#
#     T = max over engines j of (p m_j + s t_j)
#
# which waves of several sizes tell apart: `pass_law` is the fit of least absolute deviations, by least squares that are
# weighted with the residuals of the fit before (IRLS), as is the engine that ends last. So a wave beside which
# something else ran on the machine counts as little as in a median. A role's seconds on other numbers of devices are
# those of the simulator's `fixed + work / n`.
#
# Times of the two layouts are kept apart: devices that generate while others train share the machine's memory, caches
# and cores with them.

_ROUNDS = 30
_CLOSE = 1e-4
"""Residuals below this share of a wave's seconds count as much as this."""
_MOST_LENGTHS = 2**14


@dataclass(frozen=True, kw_only=True)
class Wave:
    """Answers that were generated, all begun at once."""

    loads: tuple[tuple[int, int], ...]
    """(longest, all tokens) of each engine."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RoleTimes:
    """What was measured in one layout."""

    layout: RoleLayout
    waves: tuple[Wave, ...]
    train: tuple[float, ...]
    """Seconds of a batch's updates."""
    score: tuple[float, ...]
    """Seconds of the reference's pass over a batch; empty without a reference."""
    transfer: tuple[float, ...]
    """Seconds in which the weights came to all rollouts; empty where they are the actor's own."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All that was measured; at least one layout."""

    together: RoleTimes | None
    apart: RoleTimes | None
    lengths: tuple[int, ...]
    """Tokens of answers."""
    reward: float
    """Seconds of one reward worker for a group."""
    refused: float
    """Share of groups that a filter drops."""


def pass_law(waves: Sequence[Wave]) -> tuple[float, float]:
    """(p, s) in seconds."""
    law, weights = (1.0, 0.0), [1.0] * len(waves)
    for _ in range(_ROUNDS):
        rows = []
        for wave, weight in zip(waves, weights, strict=True):
            longest, tokens = max(wave.loads, key=lambda load: law[0] * load[0] + law[1] * load[1])
            rows.append((longest * weight, tokens * weight, wave.seconds * weight))
        law = least_squares(rows)
        weights = [
            max(abs(wave.seconds - _seconds(wave, law)), _CLOSE * wave.seconds) ** -0.5 for wave in waves
        ]
    return law


def _seconds(wave: Wave, law: tuple[float, float]) -> float:
    return max(law[0] * longest + law[1] * tokens for longest, tokens in wave.loads)


def simulation_of(config: RLConfig, measured: Measured, *, engine: int, together: bool) -> RlSimulation:
    """The loop of one kind of layout, for the simulator. `engine`: devices of a copy of the rollout."""
    times = measured.together if together else measured.apart
    assert times is not None
    other = measured.apart if together else measured.together
    rl, role = config.rl, config.roles.rollout
    per_pass, per_sequence = pass_law(times.waves)
    transfer = statistics.median(times.transfer) if times.transfer else 0.0
    setup = RlSimulation(
        devices=2 * engine,
        batch=rl.prompts,
        group=rl.group,
        updates=rl.minibatches,
        staleness=rl.staleness,
        order=rl.order,
        lengths=Lengths(
            distribution="observed", observed=measured.lengths[:_MOST_LENGTHS], longest=rl.max_tokens
        ),
        generation=GenerationTime(
            pass_seconds=per_pass, sequence_seconds=per_sequence, slots=role.batch, engine=engine
        ),
        train=_role_time(times, other, "train"),
        score=_role_time(times, other, "score"),
        reward_seconds=measured.reward,
        reward_workers=config.task.workers,
        refused=measured.refused,
        transfer_seconds=transfer,
        switch_seconds=transfer,
        seed=config.seed,
    )
    # A run on one device has no other layout; the simulation's section asks for two.
    return setup.model_copy(update={"devices": times.layout.train}) if together else setup


def _role_time(own: RoleTimes, other: RoleTimes | None, role: str) -> RoleTime:
    """Of the layout's own number of devices as measured there, of others by both."""
    found: dict[int, float] = {}
    for times in (other, own):
        if times is not None and (seconds := getattr(times, role)):
            found[times.layout.train] = statistics.median(seconds)
    return RoleTime(measured=found)
