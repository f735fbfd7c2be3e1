"""Measured times of the roles, and the simulation that they make.

A wave is a number of answers that engines generate from start to end, all begun at once. With m_j the longest and t_j
all tokens of engine j, whose passes take p + k s seconds for k running answers,

    T = max over engines j of (p m_j + s t_j)

which waves of several sizes tell apart: `pass_law` is the fit of least absolute deviations, by least squares that are
weighted with the residuals of the fit before (IRLS), as is the engine that ends last. So a wave beside which something
else ran on the machine counts as little as in a median. A role's seconds on other numbers of devices are those of the
simulator's `fixed + work / n`.

Times of the two layouts are kept apart: devices that generate while others train share the machine's memory, caches and
cores with them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hyper_parallel.config.rl_run import RLConfig
from hyper_parallel.config.rl_simulation import GenerationTime, Lengths, RlSimulation, RoleTime
from hyper_parallel.rl.role_split.candidates import RoleLayout
from hyper_parallel.rl.simulator.scaling import least_squares

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
