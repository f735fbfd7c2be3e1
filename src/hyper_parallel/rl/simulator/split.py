"""Choice of the devices that generate and those that train, for the least simulated time of a step.

No split r + (n - r) can be quicker than either role alone:

    step(r) >= max(train(n - r), tokens (p / slots + s) e / r)       `lower_bound`

since an engine draws most tokens per second with all slots taken. Splits are simulated in the order of that bound,
until it reaches the best time found (in `ranked_splits`: that of the last place that counts). No split that was left
out can be better, but for the sampled lengths, whose mean the bound takes from their distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hyper_parallel.config.rl_simulation import RlSimulation
from hyper_parallel.rl.simulator import lengths, scaling
from hyper_parallel.rl.simulator.result import LoopResult
from hyper_parallel.rl.simulator.run import simulate_loop


@dataclass(frozen=True, kw_only=True)
class Split:
    """The devices of each role."""

    rollout: int
    train: int
    result: LoopResult
    """The loop that they give, simulated."""
    simulated: int
    """How many splits were simulated."""


def best_split(setup: RlSimulation) -> Split:
    """The split of `setup.devices` with the least time per step; the fewest rollouts among equals. Raises ConfigError
    as `simulate_loop`."""
    engine = setup.generation.engine
    found = ranked_splits(
        setup, [(rollout, setup.devices - rollout) for rollout in range(engine, setup.devices, engine)], 1
    )
    best = found[0]
    return Split(rollout=best.rollout_devices, train=best.train_devices, result=best, simulated=len(found))


def ranked_splits(setup: RlSimulation, splits: Sequence[tuple[int, int]], first: int = 2) -> list[LoopResult]:
    """Simulated splits (rollout, train), the quickest first and the fewest rollouts among equals.

    They may leave some of `setup.devices` unused. `first`: how many of the quickest are known to be so; of slower
    splits some are not simulated. Raises ConfigError as `simulate_loop`.
    """
    setups = {
        (rollout, train): setup.model_copy(update={"devices": rollout + train, "rollout": rollout})
        for rollout, train in splits
    }
    ordered = sorted((lower_bound(one, split[0]), split) for split, one in setups.items())
    found = list[LoopResult]()
    for bound, split in ordered:
        if len(found) >= first and bound >= found[first - 1].seconds:
            break
        found.append(simulate_loop(setups[split]))
        found.sort(key=lambda one: (one.seconds, one.rollout_devices))
    return found


def lower_bound(setup: RlSimulation, rollout: int) -> float:
    """Seconds that a step takes at least with that many devices for rollouts."""
    actor = setup.devices - rollout
    train = scaling.seconds_on(setup.train, actor, "train")
    if setup.rescore:
        train += scaling.seconds_on(setup.score, actor, "score")
    per_pass, per_sequence = scaling.generation_law(setup)
    tokens = setup.groups * setup.group * lengths.mean(setup.lengths) / (1 - setup.refused)
    rate = per_pass / setup.generation.slots + per_sequence
    return max(train, tokens * rate * setup.generation.engine / rollout)
