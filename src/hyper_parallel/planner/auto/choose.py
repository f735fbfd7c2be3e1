"""Chooses a strategy for a run file with open axes: estimate all, simulate a few, take the best.

    candidates = the best estimates, at most `ALIKE` with the same degrees       `candidates`
    chosen     = the least predicted step of those that fit                     `choose`
    close      = those that are predicted to take at most `CLOSE` of it

The closed forms know a step by a few numbers; what tells neighbours apart on a small machine (which collective a split
takes, what hides beside what) is in the step itself. So the best few are captured as `train` would run them, and
simulated on the same machine. What is close after that is for a trial to tell (`measure_candidates`).
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from hyper_parallel.cluster import Cluster
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import ConfigError, HyperParallelError
from hyper_parallel.planner import format
from hyper_parallel.planner.auto.query import precision_of, question_of
from hyper_parallel.planner.auto.resolved import Overrides, overrides_of, resolved
from hyper_parallel.planner.auto.simulate_candidates import Simulated, simulated
from hyper_parallel.planner.constants import Constants, fitted
from hyper_parallel.planner.enumerate import ranked
from hyper_parallel.planner.measured_constants import is_measured, read_off
from hyper_parallel.planner.metrics import Figures, figures
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.search import answer
from hyper_parallel.planner.solve import NothingFitsError
from hyper_parallel.units import format_bytes, format_duration

FEW = 12
"""Strategies that are simulated on a machine that was measured, where a step is small and estimates tell less."""
FEWER = 4
"""On accelerators, whose steps take a minute each to order."""
ALIKE = 3
"""At most so many of them with the same degrees."""
CLOSE = 1.5
"""Steps that are predicted to take at most so many times the least may be as quick."""

Simulate = Callable[[Sequence[RunConfig], Cluster], list[Simulated]]


@dataclass(frozen=True)
class Candidate:
    """A strategy, and what the planner says of it."""

    laid: Overrides
    found: Figures
    run: RunConfig


@dataclass(frozen=True)
class Choice:
    """The strategy of a run."""

    laid: Overrides
    """What is laid on the run file."""
    name: str
    """In a few words."""
    lines: tuple[str, ...]
    """What to say of it."""
    peak: float = 0.0
    """Bytes that a rank holds at most, by the simulator."""
    close: tuple[Choice, ...] = ()
    """Others that may be as quick: the quickest of each other degrees first, then what is left."""


def choose(
    config: RunConfig,
    cluster: Cluster,
    world: int,
    say: Callable[[str], None] = lambda _: None,
    simulate: Simulate | None = simulated,
) -> Choice:
    """The best strategy of a run on `world` devices of a cluster; `simulate=None` goes by the estimate alone.

    Raises ConfigError where nothing is legal; NothingFitsError, with what would make it fit, where nothing fits.
    """
    if is_measured(cluster):
        (seen, constants), count = read_off(cluster, precision_of(config)), FEW
    else:
        seen, constants, count = cluster, fitted(), FEWER
    question = question_of(config, seen, world, count)
    few = candidates(config, question, constants)
    predictions: list[Simulated] = []
    if simulate is not None and len(few) > 1:
        say(f"simulating the {len(few)} best estimates")
        predictions = simulate([one.run for one in few], cluster)
    timed = sorted(
        (one.seconds, place, one.peak)
        for place, one in enumerate(predictions)
        if one.seconds is not None and one.fits is not False
    )
    if not timed:
        return _choice(few[0], None, cluster, world)
    near = CLOSE * timed[0][0]
    made = [
        replace(_choice(few[place], seconds, cluster, world), peak=peak)
        for seconds, place, peak in timed
        if seconds <= near
    ]
    first: dict[str, Choice] = {}
    for one in made:
        first.setdefault(_degrees(one.laid), one)
    best, *others = [*first.values(), *(one for one in made if first[_degrees(one.laid)] is not one)]
    return replace(best, close=tuple(others))


def candidates(config: RunConfig, question: Question, constants: Constants) -> list[Candidate]:
    """The strategies that are worth a closer look, best estimate first. Raises as `choose`."""
    found: list[Candidate] = []
    seen: set[str] = set()
    alike: Counter[str] = Counter()
    why: HyperParallelError | None = None
    for one in _ranked(config, question, constants):
        laid = overrides_of(config, one, question.cluster)
        axes = _degrees(laid)
        key = json.dumps(laid, sort_keys=True)
        if key in seen or alike[axes] == ALIKE:
            continue
        seen.add(key)
        try:
            run = resolved(config, laid)
        except ConfigError as error:
            why = why or error
            continue
        alike[axes] += 1
        found.append(Candidate(laid, one, run))
        if len(found) == question.top:
            break
    if not found and why is not None:
        raise why
    return found


def _degrees(laid: Overrides) -> str:
    return json.dumps(laid["strategy"]["axes"], sort_keys=True)


def _ranked(config: RunConfig, question: Question, constants: Constants) -> Iterable[Figures]:
    found = ranked(question, constants)
    first = next(found, None)
    if first is not None:
        return itertools.chain([first], found)
    if config.strategy.memory.device is not None:
        # What does not fit within the budget is moved, as little as there is of it.
        smallest = answer(replace(question, top=1), constants).smallest
        assert smallest is not None
        return figures(smallest.table, smallest.estimate)
    raise NothingFitsError(_floor(question, constants))


def _choice(one: Candidate, predicted: float | None, cluster: Cluster, world: int) -> Choice:
    where = cluster.name or cluster.source
    figure = format_duration(one.found.seconds)
    if not is_measured(cluster):
        low, high = one.found.between
        figure += f" ({format_duration(low)}–{format_duration(high)} in 90% of published runs)"
    step = f"a step is estimated to take {figure}"
    if predicted is not None:
        step += f", and {format_duration(predicted)} in the simulator's prediction"
    name = f"{format.axes(one.found.strategy)}; {format.settings(one.found.strategy)}"
    return Choice(one.laid, name, (f"chosen for {world} workers on {where}: {name}", step))


def _floor(question: Question, constants: Constants) -> str:
    """Why nothing fits, and what would."""
    found = answer(question, constants)
    assert found.smallest is not None
    least = figures(found.smallest.table, found.smallest.estimate)[0]
    spread = f"{format.axes(least.strategy)}, {format.settings(least.strategy)}"
    return (
        f"strategy: auto: the model fits no strategy of {question.devices} workers: the smallest of {found.counted:,} "
        f"needs {format.memory(least)} on a device that has {format_bytes(least.capacity)} (estimated; {spread}); what "
        "would make it fit: more workers, a shorter data.sequence, or a budget (strategy.memory.device with host), "
        "with which what does not fit is moved"
    )
