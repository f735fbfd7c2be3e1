"""Graph cache: one captured step for each batch shape.

The shadow is the model on the meta device, parallelized like the real one and over the same process groups. So a step
is known to be capturable before the real model is parallelized for it, and capturing allocates nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, fx

from hyper_parallel.errors import BudgetError, CaptureError, CompileError, GraphError, HyperParallelError
from hyper_parallel.graph import Pass, StepGraph, executable
from hyper_parallel.graph.accumulate import Accumulation
from hyper_parallel.graph.capture_overrides import uncollected
from hyper_parallel.graph.compiled import compiled
from hyper_parallel.graph.dynamic_sizes import uncertain
from hyper_parallel.graph.execute import Host
from hyper_parallel.graph.pass_manager import SCHEDULE, rewritten
from hyper_parallel.graph.step_context import region_of
from hyper_parallel.launch.heartbeat import pulse
from hyper_parallel.offloading import Runtime
from hyper_parallel.offloading.pass_pipeline import passes
from hyper_parallel.step.accumulation import (
    AccumulatedExecutable,
    accumulating,
    repeated,
    rewritten_loop,
    whole_step,
)
from hyper_parallel.step.batches import MicroBatch
from hyper_parallel.step.capture_train_step import BatchShape, capture_one
from hyper_parallel.step.graph_store import GraphStore
from hyper_parallel.step.memory_budget import Budget
from hyper_parallel.step.recipe import Recipe

log = logging.getLogger(__name__)


MANY = 8
"""Shapes of batches at which a run says how there could be fewer."""


class RunsStep(Protocol):
    """A graph ready to run: `graph.Executable`, or what runs as it does."""

    def run(self, tensors: Mapping[str, Tensor], host: Host | None = None) -> dict[str, Tensor]:
        """As of `Executable`."""

    def node_of(self, error: BaseException) -> fx.Node | None:
        """As of `Executable`."""


@dataclass(frozen=True)
class Captured:
    """A step as a graph, and ready to run."""

    step: StepGraph
    """What runs: where layers are compiled, each is a node."""
    executable: RunsStep
    plain: StepGraph
    """The same before compiling."""
    runtime: Runtime | None = None
    """What moves its storages, where it has a memory budget."""
    load: float | None = None
    """How many times their even share of the rows a rank's experts may get within the budget; None where no size
    depends on it."""
    loop: Accumulation | None = None
    """The loop over micro-batches whose body `plain` is; None where that is the whole step."""


class Graphs:
    """The graphs of one rank of a run."""

    def __init__(
        self,
        shadow: Recipe,
        device: torch.device | str,
        artifacts: Path | None = None,
        budget: Budget | None = None,
        *,
        whole: bool = False,
        store: GraphStore | None = None,
    ) -> None:
        """`shadow`: the run's recipe, of a model on the meta device; `device`: where the step will run; `artifacts`:
        the folder of what is compiled for it, None to compile nothing; `budget`: the memory that steps may use; with
        one nothing is compiled; `whole`: steps run as one graph of all their micro-batches, as they do under a budget,
        and not as a loop; `store`: where captured steps are kept for later runs, None to keep none. Where collectives
        are ordered, all ranks must ask for the same shapes in every step."""
        assert artifacts is None or budget is None, "what is compiled holds what no plan knows of"
        self.shadow, self._device, self._artifacts = shadow, device, artifacts
        self.ordered, self.budget = True, budget
        """Whether collectives may leave the order of the model's code, and the budget."""
        self._whole, self._store = whole or budget is not None, store
        self._kept: dict[BatchShape, tuple[str | None, bytes | None]] = {}
        """Keys and files of the store for shapes that are about to be asked for."""
        self._captured: dict[BatchShape, Captured] = {}
        self.refused: str | None = None
        """Why a shape could not be captured; None while every one could."""
        self._notes: list[str] = []
        self.uncompiled: str | None = None
        """Why a graph could not be compiled; None while every one could that was to be."""

    def __getitem__(self, shape: BatchShape) -> Captured:
        """The graph of a shape for which `ready` was true."""
        return self._captured[shape]

    @property
    def captured(self) -> list[Captured]:
        """Those of all shapes so far."""
        return list(self._captured.values())

    def note(self, text: str) -> None:
        """Have something told to whoever follows the run."""
        self._notes.append(text)

    def told(self) -> list[str]:
        """What was noted since this was asked the last time."""
        notes, self._notes = self._notes, []
        return notes

    def stored(self, shape: BatchShape) -> bool:
        """Whether the store has the step of a shape, so that `ready` reads it; with several ranks all must, or none:
        `not_stored`. No collective."""
        if self._store is None:
            return False
        device = torch.device(self._device)
        key = self._store.key(self.shadow, shape, device, self._passes(), self._whole)
        content = None if key is None else self._store.find(key)
        self._kept[shape] = key, content
        return content is not None

    def not_stored(self, shape: BatchShape) -> None:
        """Have the step of a shape captured, whether or not the store has it."""
        if shape in self._kept:
            self._kept[shape] = self._kept[shape][0], None

    def ready(self, shape: BatchShape) -> bool:
        """Whether there is a graph for this shape; it is captured now if there was none. No collective.

        Raises HyperParallelError for what would stop an eager step as well.
        """
        if self.refused is not None:
            return False
        if shape not in self._captured:
            begun = time.perf_counter()
            try:
                with pulse.operation("capturing a step"), uncollected():
                    self._captured[shape] = self._capture(shape)
                self._note_shape(shape, time.perf_counter() - begun)
            except (CaptureError, GraphError) as error:
                log.debug("the step could not be captured", exc_info=True)
                self.refused = str(error)
            except HyperParallelError:
                raise
            # An optimizer of the user's is built here, on tensors of a kind that it was not written for.
            except Exception as error:
                log.debug("the step could not be captured", exc_info=True)
                self.refused = f"the step cannot be captured: {type(error).__name__}: {error}"
        return self.refused is None

    def _capture(self, shape: BatchShape) -> Captured:
        begun = time.perf_counter()
        plain, loop, known = self._rewritten(shape)
        log.info(
            "the step as a graph: %d nodes, %s in %.1f s (%s)",
            len(plain.graph.nodes),
            "from the cache" if known else "captured",
            time.perf_counter() - begun,
            _described(shape),
        )
        if self.budget is not None:
            return self._planned(plain, self.budget, self.shadow.handle.strategy.memory.expert_load)
        return self._runnable(plain, shape, loop)

    def _rewritten(self, shape: BatchShape) -> tuple[StepGraph, Accumulation | None, bool]:
        """The step after all passes but the budget's, the loop whose body it is, and whether it was in the store."""
        store = self._store
        if store is None:
            return *self._captured_anew(shape), False
        if shape not in self._kept:
            self.stored(shape)
            if self.shadow.handle.world > 1:
                # Nobody asked the other ranks whether they have it too.
                self.not_stored(shape)
        key, content = self._kept.pop(shape)
        found = None if content is None else store.read(content, self.shadow.handle)
        if found is not None:
            return *found, True
        plain, loop = self._captured_anew(shape)
        if key is not None:
            store.save(key, plain, loop)
        return plain, loop, False

    def _captured_anew(self, shape: BatchShape) -> tuple[StepGraph, Accumulation | None]:
        kinds = list(dict.fromkeys(shape.each))
        level, count = self.shadow.handle.strategy.memory.shard, shape.count
        steps = [capture_one(self.shadow, kind, count, self._device) for kind in kinds]
        if count == 1:
            return rewritten(steps[0], self._passes()), None
        if len(kinds) > 1:
            loops = [accumulating(rewritten(step, self._passes()), level) for step in steps]
            return whole_step([loops[kinds.index(kind)] for kind in shape.each]), None
        loop = rewritten_loop(steps[0], level, count, self._passes())
        return (repeated(loop, count), None) if self._whole else (loop.body, loop)

    def begin(self, shape: BatchShape, refused: bool) -> None:
        """State rests from now on where the plan of this shape wants it. `refused`: some rank has no graph for it.

        Raises BudgetError where that is so.
        """
        if refused:
            raise BudgetError(over_budget(self.refused or ELSEWHERE))
        runtime = self[shape].runtime
        assert self.budget is not None
        assert runtime is not None
        self.budget.begin(runtime)

    def shape_of(self, micro: Sequence[MicroBatch]) -> BatchShape:
        """The shape by which the graph of these micro-batches is known."""
        return BatchShape.of(micro)

    def runs(self, plain: StepGraph, step: StepGraph, runtime: Runtime) -> RunsStep:
        """What runs a step that was made of `plain`, with the moves of `runtime`."""
        return executable(step, cache=runtime)

    def _runnable(self, plain: StepGraph, shape: BatchShape, loop: Accumulation | None) -> Captured:
        """Compiled where that is wanted. `loop`: whose body `plain` is."""
        run = self._compiled(plain)
        if loop is None:
            return Captured(run, executable(run), plain)
        return Captured(run, AccumulatedExecutable.of(loop, shape.count, run), plain, loop=loop)

    def _passes(self) -> tuple[Pass, ...]:
        """The passes of every step, but for the budget's, which is run again where experts get more rows."""
        return passes(self.shadow.handle.strategy, None, self._device, ordered=self.ordered)

    @property
    def orders_collectives(self) -> bool:
        """Whether a pass chooses the order of collectives, so that ranks could choose different ones."""
        return any(SCHEDULE in one.provides for one in self._passes())

    def _planned(self, plain: StepGraph, budget: Budget, load: float) -> Captured:
        begun = time.perf_counter()
        offload = budget.offload(load)
        rewritten(plain, [offload])
        runtime = budget.runtime(offload)
        log.info("%s (planned in %.1f s)", budget.plans[-1], time.perf_counter() - begun)
        run = self.runs(plain, runtime.step, runtime)
        return Captured(runtime.step, run, plain, runtime, load if uncertain(plain) else None)

    def planned_anew(self, graph: Captured, load: float) -> Captured | str:
        """The same step with memory for rows that are `load` times as many as the even share; or why there is no such
        plan. No collective."""
        assert self.budget is not None
        try:
            return self._planned(graph.plain, self.budget, load)
        except BudgetError as error:
            return str(error)

    def replace(self, graph: Captured, by: Captured) -> None:
        """Run the second from now on where the first was run."""
        (shape,) = (shape for shape, known in self._captured.items() if known is graph)
        self._captured[shape] = by
        self.drop(graph)

    def drop(self, graph: Captured) -> None:
        """A graph with a budget will not be run any more."""
        assert self.budget is not None
        assert graph.runtime is not None
        self.budget.drop(graph.runtime)

    def _note_shape(self, shape: BatchShape, seconds: float) -> None:
        """Say that a shape is new where a run is under way, and where there come to be many."""
        count = len(self._captured)
        if count == 1:
            return
        made, plan = (
            ("captured", "") if self.budget is None else ("captured and planned", self.budget.plans[-1])
        )
        text = f"a batch of a new shape ({_described(shape)}): its step was {made} in {seconds:.1f} s"
        self.note(f"{text}; {plan}" if plan else text)
        if count == MANY:
            self.note(
                f"{count} shapes of batches so far, and the step of each is {made} by itself: rows that are packed "
                "(data.pack: true), or padded to few lengths, have fewer"
            )

    def _compiled(self, step: StepGraph) -> StepGraph:
        """What is to run: `step` compiled, or as it is."""
        if self._artifacts is None:
            return step
        log.info(
            "the step is being compiled; later runs of the same step take what is compiled from the cache"
        )
        try:
            done = compiled(step, self._artifacts)
        except CompileError as error:
            log.debug("the step could not be compiled", exc_info=True)
            self._artifacts = None
            self._warn_uncompiled(str(error))
            return step
        log.info("%s", done)
        return done.step

    def unscheduled(self) -> None:
        """Choose no order of collectives, and forget the graphs for which one was."""
        self.ordered = False
        self._captured = {}
        if self.budget is not None:
            self.budget.forget()

    def _warn_uncompiled(self, why: str) -> None:
        self.uncompiled = why
        log.warning("%s", uncompiled_because(why))

    def refuse_compiled(self, why: str) -> None:
        """Run uncompiled from now on because compiled code failed, for the reason `why`, which a warning gives."""
        self._warn_uncompiled(why)
        self.as_captured()

    def as_captured(self) -> None:
        """Compile nothing, and forget what was compiled."""
        self._artifacts = None
        self._captured = {
            shape: self._runnable(graph.plain, shape, graph.loop) for shape, graph in self._captured.items()
        }


ELSEWHERE = "another worker's step cannot be captured; its log says why"

ELSEWHERE_UNCOMPILED = "another worker's step cannot be compiled; its log says why"


def uncompiled_because(why: str) -> str:
    """What is shown when a run's graphs are not compiled although they were to be, and `why`."""
    return (
        f"the step cannot be compiled: {why}. It runs uncompiled: as right, but slower. train.compile=false (of an "
        "actor: roles.actor.compile=false) asks for this and is silent."
    )


UNCOMPILED_ADVICE = (
    "train.compile=false (of an actor: roles.actor.compile=false) runs the same steps uncompiled"
)


def code_failed(node: fx.Node, when: str, error: BaseException) -> str:
    """What is said where `error` arose in compiled code, which `node` calls."""
    region = region_of(node)
    place = f"{region.layer or 'the model'} ({region.phase})"
    reason = (str(error).strip().splitlines() or [""])[0]
    return f"compiled code of {place} failed in {when}: {type(error).__name__}: {reason}"


def eagerly(why: str) -> str:
    """What is shown when a run goes on eagerly, and `why`."""
    return (
        f"{why}\nEvery step runs eagerly instead: as right, but without what the graph gives (speed, offload, "
        "simulation). train.engine=eager (of an actor: roles.actor.engine=eager) asks for this and is silent."
    )


def over_budget(why: str) -> str:
    """What is said when a step has no graph although it is to stay within a budget, and `why`."""
    return (
        f"strategy.memory.device: {why}\nA budget needs the step's graph; leave the budget out to run eagerly, with as "
        "much memory as it takes"
    )


def _described(shape: BatchShape) -> str:
    sizes = " + ".join(
        f"{rows} × {length}{', packed' if packed else ''}"
        for (rows, length), packed in zip(shape.micro_batches, shape.documents, strict=True)
    )
    return f"rows × positions: {sizes}"
