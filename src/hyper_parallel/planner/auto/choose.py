"""Chooses a strategy for a run file with open axes: estimate all, simulate a few, take the best.

    candidates = the best estimates, at most `ALIKE` with the same degrees       `candidates.candidates`
               + the best estimates with a pipeline, at most `PIPED`            `candidates.shortlist`
    chosen     = the least predicted step of those that fit                     `choose`
    close      = those that are predicted to take at most `CLOSE` of it

A pipeline is chosen only where it is faster than every strategy without one by more than `TIE` (`weighted`), or where
none of them fits.

The closed forms know a step by a few numbers; what tells neighbours apart on a small machine (which collective a split
takes, what hides beside what) is in the step itself. So the best few are captured as `train` would run them, and
simulated on the same machine. What is close after that is for a trial to tell (`measure_candidates`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hyper_parallel.cluster import Cluster
from hyper_parallel.config import RunConfig
from hyper_parallel.planner.auto.candidates import (
    CLOSE,
    Candidate,
    Shortlist,
    degrees,
    has_pipeline,
    shortlist,
    simulated,
)
from hyper_parallel.planner.auto.machine import is_measured, read_off
from hyper_parallel.planner.auto.open_axes import Overrides, precision_of
from hyper_parallel.planner.constants import constants_for
from hyper_parallel.planner.framework_profiles import HYPER_PARALLEL
from hyper_parallel.planner.metrics import Simulated
from hyper_parallel.planner.solve import TIE
from hyper_parallel.units import format_bytes, format_duration

FEW = 12
"""Strategies that are simulated on a machine that was measured, where a step is small and estimates tell less."""
FEWER = 4
"""On accelerators, whose steps take a minute each to order."""

Simulate = Callable[[Sequence[RunConfig], Cluster], list[Simulated]]


@dataclass(frozen=True)
class Choice:
    """The strategy of a run."""

    laid: Overrides
    """Overrides of the run file."""
    name: str
    """In a few words."""
    lines: tuple[str, ...]
    """What to say of it."""
    peak: float = 0.0
    """Bytes that a rank holds at most, by the simulator; by the estimate, with the host's, where nothing is
    simulated."""
    close: tuple[Choice, ...] = ()
    """Others that may be as quick: the quickest of each other degrees first, then what is left."""

    @property
    def piped(self) -> bool:
        """Whether it has a pipeline."""
        return has_pipeline(self.laid)

    def weighted(self, seconds: float) -> float:
        """Seconds of a step by which it is compared: a pipeline's count for `TIE` more."""
        return seconds * (1 + TIE) if self.piped else seconds


def choose(
    config: RunConfig,
    cluster: Cluster,
    world: int,
    say: Callable[[str], None] = lambda _: None,
    simulate: Simulate | None = simulated,
) -> Choice:
    """The best strategy of a run on `world` devices of a cluster; `simulate=None` goes by the estimate alone: `close`
    are then those whose estimates are.

    Raises ConfigError where nothing is legal; NothingFitsError, with what would make it fit, where nothing fits.
    """
    if is_measured(cluster):
        (seen, constants), count = read_off(cluster, precision_of(config)), FEW
    else:
        seen, constants, count = cluster, constants_for(HYPER_PARALLEL, cluster), FEWER
    listed = shortlist(config, seen, world, count, constants)
    few = listed.few
    predictions: list[Simulated] = []
    if simulate is not None and len(few) > 1:
        say(f"simulating the {len(few)} best estimates")
        predictions = simulate([one.run for one in few], cluster)
    plain = [_choice(one, None, cluster, world) for one in few]
    if simulate is None:
        return _by_estimates(plain, listed)
    timed = sorted(
        (plain[place].weighted(one.seconds), place, one)
        for place, one in enumerate(predictions)
        if one.seconds is not None and one.fits is not False
    )
    if not timed:
        place = min(range(len(few)), key=lambda at: plain[at].weighted(few[at].found.seconds))
        return _beside_other_kind(plain[place], place, listed, predictions)
    near = CLOSE * timed[0][0]
    choices = [
        replace(
            _beside_other_kind(_choice(few[place], one.seconds, cluster, world), place, listed, predictions),
            peak=one.peak or 0.0,
        )
        for seconds, place, one in timed
        if seconds <= near
    ]
    return _with_close(choices)


def _by_estimates(plain: Sequence[Choice], listed: Shortlist) -> Choice:
    """The best estimate, with the others that may be as quick by theirs; data parallelism alone is close always."""
    order = sorted(range(len(plain)), key=lambda at: (plain[at].weighted(listed.few[at].found.seconds), at))
    if listed.few[0].run.strategy.memory.device is not None and not any(one.piped for one in listed.few):
        order = [
            0,
            *(at for at in order if at),
        ]  # data parallelism alone was added after it, whether it fits or not
    near = CLOSE * listed.few[order[0]].found.seconds
    data = [at for at in order if _data_only(listed.few[at])]
    close = [at for at in order if listed.few[at].found.seconds <= near]
    choices = []
    for at in dict.fromkeys([order[0], *data, *close]):
        found = listed.few[at].found
        one = _beside_other_kind(plain[at], at, listed, [])
        choices.append(replace(one, peak=found.peak + found.on_host))
    return _with_close(choices)


def _data_only(one: Candidate) -> bool:
    """Whether ranks divide nothing but the data, all along one axis."""
    axes = {axis for axis, degree in one.laid["strategy"]["axes"].items() if degree != 1}
    return axes in ({"replicate"}, {"shard"})


def _with_close(choices: Sequence[Choice]) -> Choice:
    """The first, with the others as close to it: the first of each set of degrees before what is left."""
    first: dict[str, Choice] = {}
    for one in choices:
        first.setdefault(degrees(one.laid), one)
    rest = [one for one in choices if all(one is not other for other in first.values())]
    best, *others = [*first.values(), *rest]
    return replace(best, close=tuple(others))


def _beside_other_kind(
    chosen: Choice, place: int, listed: Shortlist, predictions: Sequence[Simulated]
) -> Choice:
    """The choice with a line that says why it has a pipeline or has none. `place`: its own among those listed."""
    others = [at for at, one in enumerate(listed.few) if one.piped != listed.few[place].piped]
    sentence = listed.told
    if others:
        _, figure = min(_figure(listed.few[at], predictions[at] if predictions else None) for at in others)
        sentence = f"the best strategy {'without' if chosen.piped else 'with'} a pipeline, {figure}"
    return replace(chosen, lines=(*chosen.lines, sentence)) if sentence else chosen


def _figure(one: Candidate, prediction: Simulated | None) -> tuple[float, str]:
    """Seconds of a step, inf where it cannot run; and the strategy with these, or with the reason."""
    if prediction is None:
        seconds = one.found.seconds
        return seconds, f"{one.name}, is estimated to take {format_duration(seconds)} a step"
    if prediction.seconds is None:
        return math.inf, f"{one.name}, cannot be simulated: {prediction.reason}"
    if prediction.fits is False:
        return math.inf, f"{one.name}, does not fit: its peak is {format_bytes(prediction.peak or 0.0)}"
    return (
        prediction.seconds,
        f"{one.name}, is predicted to take {format_duration(prediction.seconds)} a step",
    )


def _choice(one: Candidate, predicted: float | None, cluster: Cluster, world: int) -> Choice:
    figure = format_duration(one.found.seconds)
    if not is_measured(cluster):
        low, high = one.found.between
        figure += f" ({format_duration(low)}–{format_duration(high)} in 90% of published runs)"
    step = f"a step is estimated to take {figure}"
    if predicted is not None:
        step += f", and {format_duration(predicted)} in the simulator's prediction"
    return Choice(one.laid, one.name, (f"chosen for {world} workers on {cluster.title}: {one.name}", step))
