"""Candidates of `strategy: auto`: the best estimates without a pipeline, and the best with one; of small spaces all
strategies are listed. They are simulated in processes of their own.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing as mp
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace

import numpy as np

from hyper_parallel import config as files
from hyper_parallel.cluster import Cluster
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.planner import format
from hyper_parallel.planner.auto.machine import is_measured
from hyper_parallel.planner.auto.open_axes import (
    Overrides,
    overrides_of,
    question_of,
    resolved,
    why_no_pipeline,
)
from hyper_parallel.planner.columns import Columns, taken
from hyper_parallel.planner.constants import Constants
from hyper_parallel.planner.cost_model.memory import HOST_PART
from hyper_parallel.planner.cost_model.step import estimate
from hyper_parallel.planner.format import ON_HOST, joined
from hyper_parallel.planner.memory_choices import MemoryChoice
from hyper_parallel.planner.metrics import Figures, Simulated, figures
from hyper_parallel.planner.query import Question
from hyper_parallel.planner.run_file import memory_budget
from hyper_parallel.planner.search import search
from hyper_parallel.planner.solve import NothingFitsError, nothing_fits
from hyper_parallel.planner.space import FULL, StrategySpace
from hyper_parallel.planner.table import SPREAD, Table
from hyper_parallel.proc import cores
from hyper_parallel.schedule import check_pipeline
from hyper_parallel.strategy import AXIS_NAMES
from hyper_parallel.strategy.strategy import BUDGET
from hyper_parallel.units import format_bytes, format_duration

ALIKE = 3
"""Candidates with the same degrees, at most."""
MOVED = 9
"""Strategies among which the best with something on the host are looked for."""
MOVED_KINDS = 3
"""Sets of degrees whose best strategy with something on the host is simulated: a plan of what moves takes longer than
all else, and estimates with transfers are off by more."""
FASTER = 1.1
"""Where something fits without a budget, one has to be this many times as fast by its estimate to be looked at."""
PIPED = 4
"""Strategies with a pipeline that are simulated besides."""
CLOSE = 1.5
"""Ratio to the least predicted step up to which another one may be as quick."""


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
    """Candidates that are worth a closer look."""

    few: list[Candidate]
    """Strategies without a pipeline first, each kind by its estimate."""
    told: str = ""
    """Why one kind is missing; empty where both are there, or where the file leaves no pipeline open."""


def shortlist(config: RunConfig, cluster: Cluster, world: int, count: int, constants: Constants) -> Shortlist:
    """The candidates without a pipeline, and those with one where the file allows it. Raises as `choose`."""
    refused: HyperParallelError | None = None
    few: list[Candidate] = []
    moved: list[Candidate] = []
    why = why_no_pipeline(config)
    try:
        few = candidates(config, question_of(config, cluster, world, count, constants=constants), constants)
    except HyperParallelError as error:
        refused = error
    if refused is None and config.strategy.memory.device is not None:
        few += _plain(config, cluster, world, constants, {degrees(one.laid) for one in few})
    if BUDGET in config.strategy.chosen:
        try:
            moved = _moved(config, cluster, world, constants)
        except HyperParallelError as error:
            refused = refused and error  # with a budget less is missing than without
        if refused is None:
            few += [one for one in moved if one.found.seconds * FASTER <= few[0].found.seconds]
    if why is None:
        try:
            question = question_of(config, cluster, world, PIPED, pipelines=True, constants=constants)
            piped = candidates(config, question, constants)
        except HyperParallelError as error:
            piped, note = [], f"no pipeline: {_plainly(error)}"
    else:
        piped, note = [], f"no pipeline: {why}" if "pipeline" in config.strategy.axes.open else ""
    if refused is not None:
        if moved and (not piped or moved[0].found.seconds < piped[0].found.seconds):
            return Shortlist(moved, f"a memory budget, since without one {_plainly(refused)}")
        if piped:
            return Shortlist(piped, f"a pipeline, since without one {_plainly(refused)}")
        raise refused from None
    if not piped:
        return Shortlist(few, note)
    near = [one for one in piped if one.found.seconds <= CLOSE * few[0].found.seconds]
    if near:
        return Shortlist(few + near)
    seconds = format_duration(piped[0].found.seconds)
    return Shortlist(few, f"no pipeline: the best, {piped[0].name}, is estimated to take {seconds} a step")


def _moved(config: RunConfig, cluster: Cluster, world: int, constants: Constants) -> list[Candidate]:
    """The best strategies with something on the host, each with other degrees; none where there is no host apart from
    the device. Raises as `choose`."""
    if is_measured(cluster) or cluster.host is None or "host" not in cluster.links:
        return []
    if config.train.engine != "graph" or config.train.compile is True:
        return []
    question = question_of(config, cluster, world, MOVED, moves=True, constants=constants)
    best: dict[str, Candidate] = {}
    for one in candidates(config, question, constants):
        if one.found.on_host:
            best.setdefault(degrees(one.laid), one)
    return list(best.values())[:MOVED_KINDS]


def _plain(
    config: RunConfig, cluster: Cluster, world: int, constants: Constants, known: Collection[str]
) -> list[Candidate]:
    """Data parallelism alone, replicated and sharded, where the file allows it and it is not `known` by its degrees: of
    a large space the search tells one division of the data only, and what everybody tries first is to be compared."""
    found = []
    for axis in ("replicate", "shard"):
        question = question_of(config, cluster, world, 1, constants=constants)
        fix = {**question.fix}
        for name in AXIS_NAMES:
            degree = world if name == axis else 1
            if fix.setdefault(name, degree) not in (degree, range(1, 2)):
                break
        else:
            with contextlib.suppress(HyperParallelError):
                found += candidates(config, replace(question, fix=fix), constants)
    return [one for one in found if degrees(one.laid) not in known]


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
        laid = overrides_of(config, one, question.cluster, question.workload.shape.layers, constants)
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
        here = replace(question, top=1, fix={**question.fix, **dict.fromkeys(ON_HOST, 0.0)})
        smallest = search(here, constants).smallest
        assert smallest is not None
        return [smallest]
    raise _nothing_fits(question, constants)


def _nothing_fits(question: Question, constants: Constants) -> NothingFitsError:
    found = search(question, constants)
    least = found.smallest
    assert least is not None
    has = memory_budget(question.cluster, constants)
    missing, needs = [], f"{format_bytes(least.peak)} on a device that has {format_bytes(least.capacity)}"
    helps = ["more workers", "a shorter data.sequence"]
    if least.peak > has.device:
        missing.append(f"{format_bytes(least.peak - has.device)} of device memory")
    if least.on_host:
        # The estimate of the host's bytes is of the rank with most of them.
        may = HOST_PART * float(least.row.host_bytes.max())
        needs += (
            f" and {format_bytes(least.on_host)} on the host, of which a worker may use {format_bytes(may)}"
        )
        if least.on_host > may:
            missing.append(f"{format_bytes(least.on_host - may)} of host memory for each worker")
            helps.append("a fast disk (strategy.memory with device, host, and flash: a folder)")
    elif question.allowed("state_on_host") == (0.0,):
        helps.append("a budget (strategy.memory.device with host), with which what does not fit is moved")
    short = f", {joined(missing)} too little" if missing else ""
    subject = f"strategy: auto: the model fits no strategy of {question.devices} workers"
    return nothing_fits(subject, found, needs + short, helps)


# Exhaustive enumeration of small strategy spaces: the oracle of the search.
#
# The search tells one strategy for each set of degrees, which is what a person wants to compare. Who is to choose by
# closer looks, as `strategy: auto` does, also wants those that differ in what they split or in which axis shares
# weights. Of the numbers of layers that may be recomputed, none, the fewest that fit, and all are listed.

MOST = 20_000
"""Points that are listed; of larger spaces the search tells the best."""
CHUNK = 256
"""Rows whose figures are made at once: who looks at the best few takes no time over the others."""


def ranked(question: Question, constants: Constants) -> Iterator[Figures]:
    """The strategies that fit, best estimate first: all of a small space, else `question.top` of the search's.

    None are where nothing fits. Raises ConfigError where no strategy is legal.
    """
    space, few = StrategySpace(question), _of_whole_layers(question)
    rows = space.degrees()
    for level in (space.micro, space.dual):
        rows, _ = level.expand(rows)
    if not rows["micro"].size or int(few.counts(rows).sum()) > MOST:
        yield from search(question, constants).best
        return
    for level in (space.splits, space.orders, space.schedules):
        rows, _ = level.expand(rows)
    base = Table.of(question.workload, question.cluster, question.profile, devices=float(question.devices))
    listed = list(few.kept(rows))
    if (FULL, None) in space.again:
        listed.append(_fewest_layers(space, rows, base, constants))
    table = Table.stacked([base.replaced(**{name: ways[name] for name in SPREAD}) for ways in listed])
    found = estimate(table, constants)
    fits = np.flatnonzero(np.broadcast_to(found.fits, table.n))
    seconds, peak = (np.broadcast_to(column, table.n)[fits] for column in (found.seconds, found.peak))
    order = fits[np.lexsort((peak, seconds))]
    for start in range(0, order.size, CHUNK):
        some = table.take(order[start : start + CHUNK])
        yield from figures(some, estimate(some, constants))


def _of_whole_layers(question: Question) -> StrategySpace:
    """The space in which all layers are recomputed or none, unless the question says how many are."""
    if "recomputed" in question.fix:
        return StrategySpace(question)
    return StrategySpace(replace(question, fix={**question.fix, "recomputed": 1.0}))


def _fewest_layers(space: StrategySpace, rows: Columns, base: Table, constants: Constants) -> Columns:
    """For each row that fits only with recomputation, the way with the fewest recomputed layers that does."""
    n = rows["micro"].size
    best = MemoryChoice(space, base, constants).fastest(rows, np.zeros(n), np.full(n, np.inf)).rows
    return taken(best, (best["recompute"] == FULL) & (best["recomputed"] < 1))


# Simulates candidate strategies in processes of their own.
#
# A worker has its process group, in which ranks cannot be faked; so rank 0 has processes capture the steps, as many at
# once as it has cores, and this one only waits.


def simulated(runs: Sequence[RunConfig], cluster: Cluster) -> list[Simulated]:
    """The prediction of each run on a cluster, in order."""
    # A cluster that was measured goes along as it is; plain data all the way down.
    tasks = [(run.model_dump_json(), cluster) for run in runs]
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["hyper_parallel.estimate"])
    try:
        with ProcessPoolExecutor(max(1, min(cores(), len(tasks))), mp_context=context) as pool:
            return list(pool.map(_simulated, tasks))
    except BrokenProcessPool:
        return [Simulated(None, reason="the process that simulated it was ended")] * len(tasks)


def _simulated(task: tuple[str, Cluster]) -> Simulated:
    from hyper_parallel.estimate import predict_run

    text, cluster = task
    run = files.RunConfig.model_validate_json(text)
    try:
        return Simulated.of(predict_run(run, cluster))
    except HyperParallelError as error:
        return Simulated(None, reason=str(error))
