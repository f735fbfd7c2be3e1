"""Candidates of `strategy: auto`: the best estimates without a pipeline, and the best with one."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hyper_parallel.cluster import Cluster
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.planner import format
from hyper_parallel.planner.auto.query import question_of, why_no_pipeline
from hyper_parallel.planner.auto.resolved import Overrides, overrides_of, resolved
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.enumerate import ranked
from hyper_parallel.planner.metrics import Figures, figures
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.search import answer
from hyper_parallel.planner.solve import NothingFitsError
from hyper_parallel.schedule import check_pipeline
from hyper_parallel.units import format_bytes, format_duration

ALIKE = 3
"""At most so many of them with the same degrees."""
PIPED = 4
"""Strategies with a pipeline that are simulated besides."""
CLOSE = 1.5
"""Steps that are predicted to take at most so many times the least may be as quick."""


@dataclass(frozen=True)
class Candidate:
    """A strategy, and what the planner says of it."""

    laid: Overrides
    found: Figures
    run: RunConfig

    @property
    def piped(self) -> bool:
        """Whether it has a pipeline."""
        return has_pipeline(self.laid)

    @property
    def name(self) -> str:
        """The strategy in a few words."""
        return f"{format.axes(self.found.strategy)}; {format.settings(self.found.strategy)}"


@dataclass(frozen=True)
class Shortlist:
    """What is worth a closer look."""

    few: list[Candidate]
    """Strategies without a pipeline first, each kind by its estimate."""
    told: str = ""
    """Why one kind is missing; empty where both are there, or where the file leaves no pipeline open."""


def shortlist(config: RunConfig, cluster: Cluster, world: int, count: int, constants: Constants) -> Shortlist:
    """The candidates without a pipeline, and those with one where the file allows it. Raises as `choose`."""
    refused: HyperParallelError | None = None
    few: list[Candidate] = []
    why = why_no_pipeline(config)
    try:
        few = candidates(config, question_of(config, cluster, world, count), constants)
    except HyperParallelError as error:
        if why is not None:
            raise
        refused = error
    if why is not None:
        return Shortlist(few, f"no pipeline: {why}" if "pipeline" in config.strategy.axes.open else "")
    try:
        question = question_of(config, cluster, world, PIPED, pipelines=True)
        piped = candidates(config, question, constants)
    except HyperParallelError as error:
        if refused is not None:
            raise refused from None
        return Shortlist(few, f"no pipeline: {_plainly(error)}")
    if refused is not None:
        return Shortlist(piped, f"a pipeline, since without one {_plainly(refused)}")
    near = [one for one in piped if one.found.seconds <= CLOSE * few[0].found.seconds]
    if near:
        return Shortlist(few + near)
    seconds = format_duration(piped[0].found.seconds)
    return Shortlist(few, f"no pipeline: the best, {piped[0].name}, is estimated to take {seconds} a step")


def _plainly(refused: HyperParallelError) -> str:
    """The reason of a refusal without its beginning and its mend."""
    return str(refused).removeprefix("strategy: auto: ").partition("; what would make it fit")[0]


def has_pipeline(laid: Overrides) -> bool:
    """Whether the candidate's strategy has a pipeline."""
    return bool(laid["strategy"]["axes"].get("pipeline", 1) != 1)


def candidates(config: RunConfig, question: Question, constants: Constants) -> list[Candidate]:
    """The strategies that are worth a closer look, best estimate first. Raises as `choose`."""
    found: list[Candidate] = []
    seen: set[str] = set()
    alike: Counter[str] = Counter()
    why: HyperParallelError | None = None
    for one in _ranked(config, question, constants):
        laid = overrides_of(config, one, question.cluster, question.workload.shape.layers)
        axes = degrees(laid)
        key, less = json.dumps(laid, sort_keys=True), json.dumps(_without_recompute(laid), sort_keys=True)
        # All layers are worth a look, should the estimate of memory be too low; what lies between is not.
        between = one.strategy["recompute"] == "selective" or float(one.strategy["recomputed"]) < 1
        if key in seen or alike[axes] == ALIKE or (between and less in seen):
            continue
        seen |= {key, less}
        try:
            run = resolved(config, laid)
            if run.strategy.axes.pipeline > 1:
                check_pipeline(run.strategy, run.micro_batches, question.workload.shape.layers)
        except HyperParallelError as error:
            why = why or error
            continue
        alike[axes] += 1
        found.append(Candidate(laid, one, run))
        if len(found) == question.top:
            break
    if not found and why is not None:
        raise why
    return found


def _without_recompute(laid: Overrides) -> Overrides:
    strategy = laid["strategy"]
    memory = {
        key: value for key, value in strategy.get("memory", {}).items() if not key.startswith("recompute")
    }
    return {**laid, "strategy": {**strategy, "memory": memory}}


def degrees(laid: Overrides) -> str:
    """The degrees of a candidate's axes as one key: candidates with equal keys differ in memory or schedule only."""
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
