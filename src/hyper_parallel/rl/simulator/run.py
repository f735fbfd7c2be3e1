"""Simulated runs of a loop, the choice of the devices of each role, and the comparison of orders.

The colocated loop is the synchronous one: all devices generate a step's groups, then all of them score and train them.
The alternating loop is that within a bound on staleness: a batch is trained as soon as it is there, while the answers
under way stand still. All are the same `Loop` with other engines, times and staleness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.config.rl_simulation import RlSimulation
from hyper_parallel.errors import ConfigError
from hyper_parallel.report.sheets import Sheet
from hyper_parallel.report.table import render
from hyper_parallel.rl.queue import ORDERS, StalenessQueue
from hyper_parallel.rl.simulator import scaling
from hyper_parallel.rl.simulator.loop import Engine, Loop, LoopTimes
from hyper_parallel.units import format_seconds


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
        length=lambda source: scaling.draw_length(setup.lengths, source),
        refused=setup.refused,
        seed=setup.seed,
    )
    before = loop.run(setup.warmup * batches_per_step)
    after = loop.run((setup.warmup + setup.steps) * batches_per_step)
    span, drawn = after.now - before.now, after.tokens - before.tokens
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
        # Answers per pass n: drawn tokens = passes n, and busy = passes p + drawn tokens s.
        running=drawn * per_pass / (busy - drawn * per_sequence) if drawn and per_pass else 0.0,
        tokens=trained / setup.steps,
        wasted=wasted / max(1, wasted + trained),
        stale_groups=(now.stale.items - then.stale.items) / setup.steps,
        histogram=now.staleness,
    )


@dataclass(frozen=True, kw_only=True)
class LoopResult:
    """Averages over the measured steps of one simulated loop."""

    kind: str
    """`colocated`, or the order of the queue."""
    rollout_devices: int
    train_devices: int
    staleness: int
    """The bound, in optimizer updates."""
    seconds: float
    """Per step."""
    generating: float
    """Share of the time in which a rollout engine runs answers, averaged over engines."""
    training: float
    """Share of the time in which the actor trains or scores."""
    bubble: float
    """Share of all devices' time in which they do neither."""
    running: float
    """Answers that run on an engine, averaged over the time in which it runs any."""
    tokens: float
    """Tokens trained per step."""
    wasted: float
    """Share of the tokens drawn that were dropped as stale, refused, or lost."""
    stale_groups: float
    """Groups dropped as stale per step."""
    histogram: Mapping[int, int]
    """How many trained groups had each staleness, warm-up included."""

    @property
    def largest_staleness(self) -> int:
        """Of any trained group."""
        return max(self.histogram)

    @property
    def mean_staleness(self) -> float:
        """Of the trained groups."""
        count = sum(self.histogram.values())
        return sum(value * many for value, many in self.histogram.items()) / count

    def to_json(self) -> dict[str, Any]:
        """Plain data, with seconds and shares rounded to what the simulation can mean."""
        return {
            "kind": self.kind,
            "rollout_devices": self.rollout_devices,
            "train_devices": self.train_devices,
            "staleness_bound": self.staleness,
            "seconds_per_step": round(self.seconds, 4),
            "generating": round(self.generating, 4),
            "training": round(self.training, 4),
            "bubble": round(self.bubble, 4),
            "running_per_engine": round(self.running, 2),
            "tokens_per_step": round(self.tokens),
            "wasted_tokens": round(self.wasted, 4),
            "stale_groups_per_step": round(self.stale_groups, 2),
            "mean_staleness": round(self.mean_staleness, 3),
            "staleness": {str(key): value for key, value in self.histogram.items()},
        }


# Admission by capacity alone, as a baseline: it limits how many groups start, and not how stale they get.
#
# Published systems admit (η + version + 1) B - accepted - running groups and train them as they finish. With everything
# else as in `StalenessQueue`, that is its `discard` order without dropping anything.


class CapacityQueue(StalenessQueue[Any]):
    """A queue whose items exceed its bound. For comparison; training uses `StalenessQueue`."""

    def __init__(self, *, batch: int, updates: int = 1, staleness: int = 0) -> None:
        """As of `StalenessQueue`."""
        super().__init__(batch=batch, updates=updates, staleness=staleness, order="discard")

    def _check(self, staleness: int) -> None:
        """Any staleness is taken."""

    def _expired(self, version: int) -> bool:
        return False

    def _choose(self) -> list[int] | None:
        return list(self._finished)[: self.batch] if self.ready() else None


# Choice of the devices that generate and those that train, for the least simulated time of a step.
#
# No split r + (n - r) can be quicker than either role alone:
#
#     step(r) >= max(train(n - r), tokens (p / slots + s) e / r)       `lower_bound`
#
# since an engine draws most tokens per second with all slots taken. Splits are simulated in the order of that bound,
# until it reaches the best time found (in `ranked_splits`: that of the last place that counts). No split that was left
# out can be better, but for the sampled lengths, whose mean the bound takes from their distribution.


def best_split(setup: RlSimulation) -> LoopResult:
    """The loop of the split of `setup.devices` with the least time per step; the fewest rollouts among equals.

    Raises ConfigError as `simulate_loop`.
    """
    engine = setup.generation.engine
    splits = [(rollout, setup.devices - rollout) for rollout in range(engine, setup.devices, engine)]
    return ranked_splits(setup, splits, 1)[0]


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
    tokens = setup.groups * setup.group * scaling.mean_length(setup.lengths) / (1 - setup.refused)
    rate = per_pass / setup.generation.slots + per_sequence
    return max(train, tokens * rate * setup.generation.engine / rollout)


WIDTH = 80


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Simulated loops on the same devices."""

    setup: RlSimulation
    colocated: LoopResult
    loops: tuple[LoopResult, ...]
    """Disaggregated; the first has the order that the file names."""
    chosen: bool
    """Whether the split of the devices was chosen."""

    def speed(self, loop: LoopResult) -> float:
        """How many times as fast as the colocated loop."""
        return self.colocated.seconds / loop.seconds

    def text(self) -> str:
        """The verdict and a table, at most 80 columns wide."""
        first = self.loops[0]
        better = self.speed(first)
        versus = f"{better:.2f} times as fast as" if better >= 1 else f"{1 / better:.2f} times slower than"
        verdict = (
            f"simulated: {format_seconds(first.seconds)} a step, {versus} the colocated synchronous loop "
            f"({format_seconds(self.colocated.seconds)}); {first.rollout_devices} devices generate, "
            f"{first.train_devices} train{' (split chosen)' if self.chosen else ''}"
        )
        rows = tuple(self._row(loop) for loop in (self.colocated, *self.loops))
        note = (
            "Rollout, Actor: share of the time in which they work. Bubble: idle share of all\n"
            "devices' time. Waste: tokens drawn and not trained. Stale: mean and largest\n"
            f"staleness of trained groups, in optimizer updates; the bound is {first.staleness}."
        )
        if any(loop.largest_staleness > loop.staleness for loop in self.loops):
            note += "\n'capacity' exceeds it: it limits how many groups start, not how stale they get."
        columns = ("Loop", "Seconds", "Speed", "Rollout", "Actor", "Bubble", "Waste", "Stale")
        title = f"a step of {self.setup.groups} groups of {self.setup.group}"
        return render(verdict, (), (Sheet(title, columns, rows, note=note),), "simulated", WIDTH)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "source": "simulated",
            "colocated": self.colocated.to_json(),
            "loops": [{**loop.to_json(), "speed": round(self.speed(loop), 4)} for loop in self.loops],
        }

    def _row(self, loop: LoopResult) -> tuple[str, ...]:
        return (
            loop.kind,
            f"{loop.seconds:.4g}",
            f"{self.speed(loop):.2f}x",
            *(f"{share:.0%}" for share in (loop.generating, loop.training, loop.bubble, loop.wasted)),
            f"{loop.mean_staleness:.1f}/{loop.largest_staleness}",
        )


def compare(setup: RlSimulation, progress: Callable[[str], None] = lambda _: None) -> Comparison:
    """Simulates the colocated loop, the file's order, and the other orders on the same split of the devices.

    Raises ConfigError where the role times say nothing about a number of devices.
    """
    progress("simulating the colocated loop")
    colocated = simulate_colocated(setup)
    if setup.rollout == "auto":
        progress("choosing the split of the devices")
        first = best_split(setup)
    else:
        progress(f"simulating {setup.order}")
        first = simulate_loop(setup)
    loops = [first]
    for order in ORDERS:
        if order != setup.order:
            progress(f"simulating {order}")
            loops.append(simulate_loop(setup.model_copy(update={"order": order}), first.rollout_devices))
    return Comparison(setup=setup, colocated=colocated, loops=tuple(loops), chosen=setup.rollout == "auto")
