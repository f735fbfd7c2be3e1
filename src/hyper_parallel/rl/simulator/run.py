"""Simulated runs of a loop: rollouts and actor on devices of their own, or all devices alternating.

The colocated loop is the synchronous one: all devices generate a step's groups, then all of them score and train them.
The alternating loop is that within a bound on staleness: a batch is trained as soon as it is there, while the answers
under way stand still. All are the same `Loop` with other engines, times and staleness.
"""

from __future__ import annotations

from hyper_parallel.config.rl_simulation import RlSimulation
from hyper_parallel.errors import ConfigError
from hyper_parallel.rl.queue import StalenessQueue
from hyper_parallel.rl.simulator import lengths, scaling
from hyper_parallel.rl.simulator.capacity_queue import CapacityQueue
from hyper_parallel.rl.simulator.engine import Engine
from hyper_parallel.rl.simulator.loop import Loop, LoopTimes
from hyper_parallel.rl.simulator.result import LoopResult


def simulate_loop(setup: RlSimulation, rollout_devices: int | None = None) -> LoopResult:
    """Rollouts on some devices, the actor on the others, at the same time, within `setup.staleness`.

    `rollout_devices`: in place of `setup.rollout`. Raises ConfigError for a number that leaves none to train, or for
    role times that say nothing about it.
    """
    given = setup.rollout if rollout_devices is None else rollout_devices
    if given == "auto" or not 0 < given < setup.devices or given % setup.generation.engine:
        raise ConfigError(
            f"simulation.rollout: {given} of {setup.devices} devices; give a multiple of generation.engine "
            f"({setup.generation.engine}) that leaves devices to train"
        )
    actor = setup.devices - given
    seconds = scaling.seconds_on(setup.train, actor, "train")
    if setup.rescore:
        seconds += scaling.seconds_on(setup.score, actor, "score")
    return _run(
        setup,
        _queue_of(setup),
        setup.order,
        given,
        actor,
        seconds,
        setup.transfer_seconds,
        setup.batches_per_step,
    )


def simulate_colocated(setup: RlSimulation) -> LoopResult:
    """All devices alternate between generation and training, synchronously. Raises ConfigError as `simulate_loop`."""
    seconds = scaling.seconds_on(setup.train, setup.devices, "train")
    seconds += scaling.seconds_on(setup.score, setup.devices, "score")
    updates = setup.updates * setup.batches_per_step
    queue = StalenessQueue[int](batch=setup.groups, updates=updates, staleness=0)
    return _run(setup, queue, "colocated", setup.devices, setup.devices, seconds, setup.switch_seconds, 1)


def simulate_alternating(setup: RlSimulation) -> LoopResult:
    """All devices alternate between generation and training, within `setup.staleness`; for 0 as `simulate_colocated`.
    Raises ConfigError as `simulate_loop`."""
    seconds = scaling.seconds_on(setup.train, setup.devices, "train")
    seconds += scaling.seconds_on(setup.score, setup.devices, "score")
    return _run(
        setup,
        _queue_of(setup),
        "colocated",
        setup.devices,
        setup.devices,
        seconds,
        setup.switch_seconds,
        setup.batches_per_step,
        alternate=True,
    )


def _queue_of(setup: RlSimulation) -> StalenessQueue[int]:
    bounds = {"batch": setup.batch, "updates": setup.updates, "staleness": setup.staleness}
    if setup.order == "capacity":
        return CapacityQueue(**bounds)
    return StalenessQueue(order=setup.order, **bounds)


def _run(
    setup: RlSimulation,
    queue: StalenessQueue[int],
    kind: str,
    rollout: int,
    actor: int,
    train: float,
    transfer: float,
    batches_per_step: int,
    alternate: bool = False,
) -> LoopResult:
    per_pass, per_sequence = scaling.generation_law(setup)
    engines = [
        Engine(setup.generation.slots, per_pass, per_sequence)
        for _ in range(rollout // setup.generation.engine)
    ]
    loop = Loop(
        engines=engines,
        queue=queue,
        times=LoopTimes(
            train=train / batches_per_step,
            transfer=transfer,
            batches_per_step=batches_per_step,
            reward=setup.reward_seconds,
            reward_workers=setup.reward_workers,
            recompute=setup.generation.recompute_seconds,
            interrupt=setup.generation.interrupt,
            alternate=alternate,
        ),
        group=setup.group,
        length=lambda source: lengths.draw(setup.lengths, source),
        refused=setup.refused,
        seed=setup.seed,
    )
    before = loop.run(setup.warmup * batches_per_step)
    after = loop.run((setup.warmup + setup.steps) * batches_per_step)
    span = after.now - before.now
    busy, training = after.busy - before.busy, after.training - before.training
    devices = setup.devices
    used = busy * setup.generation.engine + training * actor
    now, then = after.counters, before.counters
    trained = now.trained.tokens - then.trained.tokens
    wasted = now.wasted_tokens - then.wasted_tokens
    return LoopResult(
        kind=kind,
        rollout_devices=rollout,
        train_devices=actor,
        staleness=queue.bound,
        seconds=span / setup.steps,
        generating=busy / span / len(engines),
        training=training / span,
        bubble=1 - used / (devices * span),
        running=(after.tokens - before.tokens)
        and _mean_running(after.tokens - before.tokens, busy, per_pass, per_sequence),
        tokens=trained / setup.steps,
        wasted=wasted / max(1, wasted + trained),
        stale_groups=(now.stale.items - then.stale.items) / setup.steps,
        histogram=now.staleness,
    )


def _mean_running(tokens: float, busy: float, per_pass: float, per_sequence: float) -> float:
    """Answers per pass: tokens = passes n and busy = passes p + tokens s."""
    return tokens * per_pass / (busy - tokens * per_sequence) if per_pass else 0.0
