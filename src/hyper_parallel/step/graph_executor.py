"""Runs training steps from their graphs, with the results of the eager step.

What the graph leaves to the host is here: the next batch is loaded, and a graph for it captured where there is none
yet, while the device computes; the numbers of the step are looked at before anything is updated.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, fx

from hyper_parallel.compat import is_out_of_memory
from hyper_parallel.errors import BudgetError, CompileError, HyperParallelError
from hyper_parallel.graph import StepGraph, values_of
from hyper_parallel.graph.accumulate import changed_input
from hyper_parallel.graph.compiled import is_compiled
from hyper_parallel.graph.host_nodes import HOST, HostPoint
from hyper_parallel.graph.ir import is_cache
from hyper_parallel.graph.memory_effects import touched
from hyper_parallel.launch import logs
from hyper_parallel.launch.heartbeat import pulse
from hyper_parallel.launch.stop import Requests
from hyper_parallel.offloading import Runtime
from hyper_parallel.offloading.expert_overflow import (
    ELSEWHERE_FULL,
    TooUneven,
    changed_before,
    check_load,
    planned_anew,
    refused,
    wanted,
)
from hyper_parallel.step.batches import StepBatch
from hyper_parallel.step.capture_train_step import batch_inputs, state
from hyper_parallel.step.graph_cache import (
    ELSEWHERE,
    UNCOMPILED_ADVICE,
    Captured,
    Graphs,
    RunsStep,
    code_failed,
    eagerly,
    over_budget,
)
from hyper_parallel.step.nonfinite_report import counted, non_finite
from hyper_parallel.step.out_of_memory import post_mortem
from hyper_parallel.step.profiling import Profiling
from hyper_parallel.step.recipe import CONTROL_VECTOR, Recipe, StepResult
from hyper_parallel.step.replan import Replanning
from hyper_parallel.step.train_step import Stepper, accumulate, control_values_of

log = logging.getLogger(__name__)


class GraphStepper:
    """Runs steps from graphs, one after the other; holds the batch that was loaded ahead.

    Where a rank has no graph for its next batch, all ranks go on eagerly from that step on, on the same model.
    """

    def __init__(self, recipe: Recipe, graphs: Graphs, profiling: Profiling | None = None) -> None:
        self._recipe, self._graphs, self._profiling = recipe, graphs, profiling
        self._eager: Stepper | None = None
        self._replanning = None if graphs.budget is None else Replanning(graphs, graphs.budget)

    def begin(self, batch: StepBatch) -> None:
        """Take the batch that the next `run` computes; collectives, needed before the first one only."""
        recipe = self._recipe
        if self._eager is not None:
            self._eager.begin(batch)
            return
        self._state = {
            name: tensor.detach()
            for name, (_, tensor) in state(recipe.handle, recipe.optimizer).items()
            # Those of other stages of a pipeline are there without values.
            if not tensor.is_meta
        }
        ready = self._graphs.ready(self._graphs.shape_of(batch.micro))
        ends = recipe.handle.over_all_ranks(batch.tokens.new_tensor(float(not ready)))
        self.take(batch, recipe.tokens(batch), ends.item() > 0)

    def run(
        self,
        *,
        load_next: Callable[[], StepBatch] | None,
        memory: float,
        requests: Callable[[], Requests] = Requests,
    ) -> StepResult:
        """One step on the batch at hand. Arguments and errors are those of `Stepper.run`.

        Raises OutOfMemoryError, with what filled the memory, when the device's or the host's ran out.
        """
        if self._eager is not None:
            return self._eager.run(load_next=load_next, memory=memory, requests=requests)
        recipe, batch = self._recipe, self._batch
        given = self._given(batch, self._tokens, recipe.schedule(batch.step))
        while True:
            graph = self._graphs[self._graphs.shape_of(batch.micro)]
            host = _Host(
                recipe, self._graphs, batch, load_next, requests, memory, graph.load, self._replanning
            )
            mend = self._attempt(graph, given, host)
            if mend is None:
                break
            with pulse.operation("changing the step's graph"):
                mend()
        result = host.result
        if not result.finite:
            self._raise_non_finite(batch, given, result)
        if self._profiling:
            self._profiling.ended(len(batch.micro))
        recipe.optimizer.advance()
        if self._replanning is not None and self._replanning.due(result.links_changed):
            with pulse.operation("planning anew"):
                self._replanning.plan_anew()
        if host.following is not None:
            tokens = self._tokens.new_tensor(result.next_tokens)
            self.take(host.following, tokens, result.graph_ends)
        return result

    def probe(self, batch: StepBatch) -> StepResult | None:
        """What a step on `batch` would come to, as `Stepper.probe`; None where some rank has no graph for it, or no
        memory for its experts' rows."""
        if self._eager is not None:
            return self._eager.probe(batch)
        recipe, shape = self._recipe, self._graphs.shape_of(batch.micro)
        tokens = recipe.tokens(batch)
        missing = tokens.new_tensor(float(not self._graphs.ready(shape)))
        if recipe.handle.over_all_ranks(missing, "max").item() > 0:
            return None
        graph = self._graphs[shape]
        host = _Host(recipe, self._graphs, batch, None, Requests, 0.0, graph.load, None, update=False)
        if graph.runtime is not None:
            assert self._graphs.budget is not None
            self._graphs.budget.use(graph.runtime, self._state)
        why = None
        try:
            graph.executable.run(self._given(batch, tokens, 0.0), host)
        except _NoUpdate:
            return host.result
        except TooUneven:
            return None
        except Exception as error:
            why = why_uncompiled(graph, error, batch.step, recipe.handle.world)
            if why is None:
                raise
        finally:
            if graph.runtime is not None:
                graph.runtime.stopped(self._state)
        assert why is not None, "the host ends the step before its update"
        self._graphs.refuse_compiled(why)
        return self.probe(batch)

    def _given(self, batch: StepBatch, tokens: Tensor, lr_scale: float) -> dict[str, Tensor]:
        """The inputs of a step's graph."""
        step = torch.tensor(batch.step, device=tokens.device)
        scale = torch.tensor(lr_scale, dtype=torch.float64)
        return {**self._state, **batch_inputs(batch.micro, step, tokens, scale)}

    def _attempt(
        self, graph: Captured, given: Mapping[str, Tensor], host: _Host
    ) -> Callable[[], None] | None:
        """Run the step. Where it stopped and can begin again: what has to be called before that, else None."""
        if graph.runtime is not None:
            assert self._graphs.budget is not None
            self._graphs.budget.use(graph.runtime, self._state)
        try:
            with logs.at(self._batch.step + 1, where=pulse.position):
                runner = self._profiling.runner(graph) if self._profiling else graph.executable
                runner.run(given, host)
        except _NoUpdate:
            pass
        except TooUneven as stopped:
            return functools.partial(self._plan_anew, graph, stopped.load)
        except HyperParallelError:
            raise
        except Exception as error:
            handle, step = self._recipe.handle, self._batch.step
            if is_out_of_memory(error):
                raise post_mortem(graph, error, handle, step) from error
            why = why_uncompiled(graph, error, step, handle.world)
            if why is None:
                raise
            log.debug("compiled code failed", exc_info=True)
            return functools.partial(self._graphs.refuse_compiled, why)
        return None

    def _plan_anew(self, graph: Captured, load: float) -> None:
        """Have a plan with memory for the rows of the step at hand, which was stopped because of them, on every rank.

        A collective. Raises BudgetError, on every rank, where some rank has none.
        """
        assert graph.runtime is not None
        assert graph.load is not None
        handle, step = self._recipe.handle, self._batch.step
        graph.runtime.stopped(self._state)
        why = changed_before(graph.plain)
        for more in wanted(load) if why is None else ():
            found = self._graphs.planned_anew(graph, more)
            failed = self._tokens.new_tensor(float(isinstance(found, str)))
            if handle.over_all_ranks(failed, "max").item() == 0:
                assert not isinstance(found, str)
                self._graphs.replace(graph, found)
                self._graphs.note(planned_anew(step, load, graph.load, more))
                return
            if isinstance(found, str):
                why = found
            else:
                self._graphs.drop(found)
        raise refused(step, load, graph.load, why or ELSEWHERE_FULL)

    def take(self, batch: StepBatch, tokens: Tensor, graph_ends: bool = False) -> None:
        """Take the next batch, whose valid `tokens` over all ranks are known. `graph_ends`: some rank has no graph for
        it. Raises BudgetError where there is none, and must be."""
        self._batch, self._tokens = batch, tokens
        if graph_ends and self._graphs.budget is not None:
            raise BudgetError(over_budget(self._graphs.refused or ELSEWHERE))
        if graph_ends:
            log.warning("%s", eagerly(self._graphs.refused or ELSEWHERE))
            self._eager = Stepper(self._recipe)
        if self._eager is not None:
            self._eager.take(batch, tokens)

    def _raise_non_finite(self, batch: StepBatch, given: Mapping[str, Tensor], result: StepResult) -> None:
        """The graph has let go of the gradients; the parameters are what they were, so these are computed again."""
        recipe, counts = self._recipe, None
        graph = self._graphs[self._graphs.shape_of(batch.micro)]
        if graph.runtime is not None:
            runtime = graph.runtime
            counts = gradients_counted(
                graph.step,
                runtime,
                self._state,
                given,
                lambda looked: self._graphs.runs(graph.plain, looked, runtime),
            )
        else:
            model, loss_of = recipe.model.train(), recipe.loss_of
            accumulate(model, recipe.handle, batch, self._tokens, recipe.seed, recipe.loss, loss_of)
        raise non_finite(recipe.handle, batch.step, batch.rows, result.loss, result.grad_norm, counts)


class _NoUpdate(Exception):
    """Ends the run of a graph before its update."""


class _Host:
    """What a step's graph asks the host."""

    result: StepResult
    tokens: Tensor
    """Valid tokens of the following batch over all ranks."""

    def __init__(
        self,
        recipe: Recipe,
        graphs: Graphs,
        batch: StepBatch,
        load_next: Callable[[], StepBatch] | None,
        requests: Callable[[], Requests],
        memory: float,
        load: float | None,
        replanning: Replanning | None,
        update: bool = True,
    ) -> None:
        """`load`: how many times their even share of the rows a rank's experts may get. `update`: whether the step is
        to update anything."""
        self._planned, self._replanning, self._update = load, replanning, update
        self._recipe, self._graphs, self._batch = recipe, graphs, batch
        self._load_next, self._requests, self._memory = load_next, requests, memory
        self.following: StepBatch | None = None

    def __call__(self, point: HostPoint, values: Sequence[Tensor]) -> Tensor | None:
        if point is HostPoint.LOAD:
            return self._load(values[0].device)
        if point is HostPoint.ROWS:
            check_load(values[0].item(), self._planned)
            return None
        assert point is HostPoint.CHECK, point
        summed, loads = values
        self.result = self._recipe.result(summed, loads, self._batch)
        if not (self.result.finite and self._update):
            raise _NoUpdate
        return None

    def _load(self, device: torch.device) -> Tensor:
        self.following = self._load_next() if self._load_next is not None else None
        ends = self.following is not None and not self._graphs.ready(
            self._graphs.shape_of(self.following.micro)
        )
        goes_on = self.following is not None
        changed = goes_on and self._replanning is not None and self._replanning.wanted()
        return control_values_of(self.following, self._requests(), self._memory, device, ends, changed)


# Compiled code that fails when it runs: the step begins again uncompiled where that gives the step's results.
#
# Compiled code is made for inputs of certain shapes, strides and devices, and checks them; it may also choose and build
# kernels in its first run. Such an error arises in the node that calls it, in the middle of a step.


def why_uncompiled(graph: Captured, error: BaseException, step: int, world: int) -> str | None:
    """Why `step`, counted from 0, has to begin again uncompiled; None where `error` did not arise in compiled code.

    Raises CompileError where it cannot begin again: other workers are past its first collectives, or it has changed
    what it was given, such as a buffer that counts forward passes.
    """
    node = graph.executable.node_of(error)
    if node is None or not is_compiled(node):
        return None
    why = code_failed(node, f"step {step + 1}", error)
    if world > 1:
        raise CompileError(f"{why}. {UNCOMPILED_ADVICE}") from error
    if (changed := changed_input(graph.step, {node}, graph.loop)) is not None:
        raise CompileError(
            f"{why}. The step has changed {changed} by then and cannot begin again; {UNCOMPILED_ADVICE}"
        ) from error
    return why


# Finds non-finite gradients within a memory budget.
#
# Where a step is found to be unusable its gradients may be elsewhere, or gone. So the step is run again, up to where
# that was found, and the host looks at each gradient while it is there: right behind the last node that has to do with
# it.


def gradients_counted(
    step: StepGraph,
    runtime: Runtime,
    state: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
    runs: Callable[[StepGraph], RunsStep],
) -> dict[str, Tensor]:
    """What `guard.counted` says of each gradient, by the name of its parameter. The collectives are the step's. `runs`:
    what runs a graph that was made of the step.

    `state` of what the step is `given` was not changed since the step began, and rests where it wants it afterwards.
    """
    found: dict[str, Tensor] = {}
    looked, names = looking(step)
    left = iter(names)

    def host(point: HostPoint, values: Sequence[Tensor]) -> Tensor | None:
        if point is HostPoint.LOAD:
            return torch.zeros(CONTROL_VECTOR, device=values[0].device)
        if point is HostPoint.CHECK:
            raise _Seen
        if point is HostPoint.LOOK:
            found[next(left)] = counted(values[0])
        return None

    runtime.stopped(state)
    try:
        runs(looked).run(given, host)
    except _Seen:
        runtime.stopped(state)
    return found


class _Seen(Exception):
    """Ends the second run of a step."""


def looking(step: StepGraph) -> tuple[StepGraph, list[str]]:
    """The step with a point for each gradient at which the host is shown it, before the host is shown the norm; and
    the names of the gradients in the order of these points."""
    made = step.copy()
    names: dict[fx.Node, str] = {}
    seen: set[int] = set()
    checked = False
    for node in reversed(list(made.nodes)):
        if node.target is HOST and node.args[0] == HostPoint.CHECK:
            checked = True
        if not checked or is_cache(node):
            continue
        made_here = {value.storage for value in values_of(node)}
        for storage in sorted((touched(node) | made_here) & (made.gradients.keys() - seen)):
            shown = _whole(node, storage)
            if shown is not None:
                seen.add(storage)
                with made.graph.inserting_after(node):
                    look = made.graph.call_function(HOST, (HostPoint.LOOK.value, [shown], 0))
                names[look] = made.gradients[storage]
                look.meta = {key: node.meta[key] for key in ("region", "module", "recomputed")}
    return made, [names[node] for node in made.nodes if node in names]


def _whole(node: fx.Node, storage: int) -> fx.Node | None:
    """The largest value in a storage that a node is given or gives; None where that is one of several."""
    found = [
        (max(value.elements for value in values), other)
        for other in (node, *node.all_input_nodes)
        if len(values := list(values_of(other))) == 1 and values[0].storage == storage
    ]
    return max(found, key=lambda one: one[0])[1] if found else None
