"""The graphs of a pipeline's steps under a memory budget: on each rank one graph of its whole step.

The gathers, the schedule written out (`runtime.rank_graph`), the reductions and the update are one graph, over which a
budget is planned as over that of plain training. Each rank plans for itself: moves change neither the order of
instructions nor that of collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, fx

from hyper_parallel.compat import collectives
from hyper_parallel.compat.fake_tensors import faked
from hyper_parallel.compat.fx_graph import fake_mode_with_symbols
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import BudgetError, DataError
from hyper_parallel.graph import StepGraph, capture, executable, phase
from hyper_parallel.graph.capture_overrides import uncollected
from hyper_parallel.graph.dynamic_sizes import uncertain
from hyper_parallel.graph.execute import Executable, Host
from hyper_parallel.graph.gradients import GRADIENT
from hyper_parallel.graph.ir import CollectiveGroup, GivenTensor, Value, values_of
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.launch.heartbeat import pulse
from hyper_parallel.offloading import Runtime
from hyper_parallel.program import Program
from hyper_parallel.runtime.graph_interpreter import GraphInterpreter
from hyper_parallel.runtime.rank_graph import RankWriter
from hyper_parallel.runtime.rank_transfers import ProcessTransfers, RankTransfers
from hyper_parallel.shard import sharded
from hyper_parallel.shard.sharded_model import attach
from hyper_parallel.step.batches import MicroBatch
from hyper_parallel.step.capture_train_step import BatchShape, capturable, finish_step, state
from hyper_parallel.step.graph_cache import Captured, Graphs
from hyper_parallel.step.memory_budget import Budget
from hyper_parallel.step.micro_batch import LOSS, ROWS, micro_input
from hyper_parallel.step.optimizer import build_optimizer
from hyper_parallel.step.pipeline_build import BuiltPipeline
from hyper_parallel.step.pipeline_plan import StepShape
from hyper_parallel.step.recipe import Recipe
from hyper_parallel.step.stage_gradients import Arithmetic, reduced_gradients
from hyper_parallel.step.stage_plan import StagePlan


class PipelineGraphs(Graphs):
    """The graphs of one rank of a pipeline. All ranks must ask for the same shapes in the same order, since its ranks
    agree on the plan of each: `ready` is a collective where a shape is new."""

    def __init__(
        self, shadow: Recipe, pipeline: BuiltPipeline, device: torch.device | str, budget: Budget
    ) -> None:
        """`shadow`: with a handle that knows which parameters this rank holds."""
        super().__init__(shadow, device, budget=budget)
        self._pipeline = pipeline
        self._of: dict[StepGraph, tuple[Program, RankTransfers]] = {}

    def shape_of(self, micro: Sequence[MicroBatch]) -> BatchShape:
        """As of `Graphs`; whether rows hold several documents is the same on all ranks."""
        shapes = tuple((one.input_ids.size(0), one.input_ids.size(1)) for one in micro)
        return BatchShape(shapes, (self._pipeline.shape.documents,) * len(shapes))

    @property
    def orders_collectives(self) -> bool:
        """As of `Graphs`: what orders a pipeline's collectives is its plan, on which the ranks agree."""
        return False

    def _capture(self, shape: BatchShape) -> Captured:
        kinds = set(shape.each)
        if len(kinds) > 1:
            raise DataError(
                "the micro-batches of a step differ in shape, and a pipeline's are planned for one; pad rows to one "
                "length"
            )
        (kind,) = kinds
        plan = self._pipeline.plan_of(StepShape(kind.rows, kind.length, shape.count, kind.documents))
        handle = self.shadow.handle
        assert plan.program is not None, "the order of a pipeline is given"
        transfers = RankTransfers(
            plan.program,
            plan.stages.partition,
            handle.rank,
            ProcessTransfers(handle.rank),
            torch.device(self._device),
            plan.turns,
        )
        transfers.compare()
        plain = rank_step(plan, self.shadow, self._pipeline, self._device)
        if uncertain(plain):
            raise BudgetError(
                "strategy.memory.device: the rows of each expert depend on the data, and a pipeline's budget is "
                "planned for sizes that are known; leave axes.expert, the pipeline or the budget out"
            )
        self._of[plain] = plan.program, transfers
        assert self.budget is not None
        return self._planned(plain, self.budget, 1.0)

    def runs(self, plain: StepGraph, step: StepGraph, runtime: Runtime) -> PipelineExecutable:
        """As of `Graphs`."""
        program, transfers = self._of[plain]
        return PipelineExecutable(program, executable(step, cache=runtime), transfers)


class PipelineExecutable:
    """Runs a rank's step, as `Executable` runs that of plain training."""

    def __init__(self, program: Program, runs: Executable, transfers: RankTransfers) -> None:
        self._interpreter = GraphInterpreter(program, runs, transfers, pulse.instruction)

    def run(self, tensors: Mapping[str, Tensor], host: Host | None = None) -> dict[str, Tensor]:
        """As of `Executable`. Errors name the step, the stage, the micro-batch and the instruction."""
        with pulse.schedule(self._interpreter.positions):
            return self._interpreter.run(tensors, host, lambda: f"step {int(tensors['step']) + 1}")

    def node_of(self, error: BaseException) -> fx.Node | None:
        """As of `Executable`."""
        return self._interpreter.node_of(error)


@uncollected()
def rank_step(
    plan: StagePlan, recipe: Recipe, pipeline: BuiltPipeline, device: torch.device | str
) -> StepGraph:
    """The graph of this rank's step. Its inputs are named as those of `capture_one`."""
    place = recipe.handle.pipeline
    assert place is not None, "the shadow was parallelized for a pipeline"
    assert plan.program is not None, "the order of a pipeline is given"
    mine = [stage for stage, index in enumerate(plan.placement) if index == place.index]
    gather, reduce = plan.stages.gather(mine), plan.stages.reduce(mine)
    writer = RankWriter(
        plan.program, plan.stages.partition, place.devices, plan.turns, _name_of, gather, plan.stages.whole
    )
    sums = writer.schedule()
    does = Arithmetic[fx.Node](writer.copy, writer.added, writer.zeros)
    stages = {k.removeprefix(GRADIENT): v for k, v in sums.items() if k.startswith(GRADIENT)}
    gradients = reduced_gradients(stages, reduce, does)
    given = {name: node for name, node in sums.items() if not name.startswith(GRADIENT)}
    given |= {GRADIENT + name: node for name, node in gradients.items()}
    values = {name: next(values_of(node)) for name, node in given.items()}
    shared = {
        name: SharedGradient(
            plan.stages.whole.returned[GRADIENT + name].meta["value"],
            CollectiveGroup(
                str(group.group_name),
                "pipeline",
                tuple(
                    place.groups[at].ranks[place.devices.place(recipe.handle.rank)]
                    for at in plan.owners[name]
                ),
            ),
        )
        for name, group in pipeline.runner.shared.groups.items()
    }
    update = capture_update(recipe, values, shared, device)
    # Also what nothing uses takes memory; buffers are on every rank.
    held = [
        one.name for one in update.inputs if one.kind != "parameter" or place.owns(one.name.partition(".")[2])
    ]
    writer.copy(update, {**writer.inputs, **given}, held)
    return writer.finished()


def _name_of(name: str, micro_batch: int) -> str:
    """Of an input of a stage: `micro.input_ids` is one for each micro-batch, `step` and `tokens` are the step's."""
    kind, _, field = name.partition(".")
    return micro_input(micro_batch, field) if kind == "micro" else name


def pipeline_graphs(config: RunConfig, pipeline: BuiltPipeline, device: torch.device | str) -> PipelineGraphs:
    """The graphs of a run's steps, with the plan of the first. A collective.

    Raises BudgetError, on every rank, where the plan of some rank does not meet the budget.
    """
    shadow = pipeline.shadow
    attach(replace(shadow.handle, pipeline=replace(pipeline.place, owners=pipeline.plan.owners)))
    handle = sharded(shadow.model)
    budget = Budget(config.effective_strategy, device, str(Path(config.out).absolute()), handle.rank)
    shape = pipeline.shape
    first = BatchShape(((shape.rows, shape.length),) * shape.count, (shape.documents,) * shape.count)
    try:
        graphs = PipelineGraphs(Recipe.of(config, shadow.model), pipeline, device, budget)
        refused: BudgetError | None = None
        try:
            graphs.begin(first, not graphs.ready(first))
        except BudgetError as error:
            refused = error
        floor = -1.0 if refused is None else float(refused.floor or 0)
        worst = handle.over_all_ranks(torch.tensor(floor, dtype=torch.float64, device=device), "max").item()
        if refused is not None and floor == worst:
            raise refused
        if worst >= 0:
            raise BudgetError(_elsewhere(int(worst)), floor=int(worst) or None) from refused
    except BaseException:
        budget.close()
        raise
    return graphs


def _elsewhere(floor: int) -> str:
    needs = f": they need at least {floor:,} bytes" if floor else ""
    return (
        f"strategy.memory.device is too small for the stages of another worker{needs}; set it to as much, or see that "
        "worker's log"
    )


# Captures what follows the schedule of a pipeline's step: sums over the stages that share weights, and the update.
#
# It is the end of the step that plain training captures (`step.capture_train_step`), from gradients that are inputs.


@dataclass(frozen=True)
class SharedGradient:
    """A gradient of which several device groups have parts."""

    value: Value
    group: CollectiveGroup
    """Of the ranks that have them."""


def capture_update(
    recipe: Recipe,
    given: Mapping[str, Value],
    shared: Mapping[str, SharedGradient],
    device: torch.device | str = "cpu",
) -> StepGraph:
    """The graph of what follows the schedule on one rank of a pipeline.

    `recipe`: of the shadow, whose handle knows which parameters this rank holds. `given`: what the schedule came to,
    by name: ``gradient.<parameter>``, ``loss`` in the last stage, ``rows.<experts module>``. These are inputs beside
    the state, ``tokens`` and ``lr_scale``. `shared`: by parameter.
    """
    mode, model, handle = fake_mode_with_symbols(), recipe.model.train(), recipe.handle
    with faked(model, mode, device):
        with mode:
            optimizer = capturable(build_optimizer(model, recipe.optimizer.config))
            tensors = {
                name: torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device=one.device)
                for name, one in given.items()
            }
            tokens = torch.ones((), device=device)
            lr_scale = torch.ones((), dtype=torch.float64)
        recipe = replace(recipe, optimizer=optimizer)
        named = {one.parameter: one.name for one in handle.owned() if one.parameter.requires_grad}

        def gradients() -> dict[str, Tensor]:
            return {name: parameter.grad for parameter, name in named.items() if parameter.grad is not None}

        def body() -> dict[str, Tensor]:
            with phase("clip"), torch.no_grad():
                for parameter, name in named.items():
                    parameter.grad = _gradient(tensors.get(GRADIENT + name), shared.get(name))
                loss = tensors.get(LOSS)
                if loss is None:
                    loss = torch.zeros((), device=tokens.device)
            if handle.routing is not None:
                rows = {k.removeprefix(ROWS): v for k, v in tensors.items() if k.startswith(ROWS)}
                handle.routing.counts.update(rows)
            finish_step(recipe, gradients().values(), loss, tokens, lr_scale)
            return {}

        inputs = {
            **state(handle, optimizer),
            **{
                name: GivenTensor("gradient" if name.startswith(GRADIENT) else "input", one)
                for name, one in {**tensors, "tokens": tokens, "lr_scale": lr_scale}.items()
            },
        }
        try:
            with mode, current_step().installed():
                found = capture(body, inputs, model, gradients)
        finally:
            # Let go of the gradients.
            for parameter in named:
                parameter.grad = None
            if handle.routing is not None:
                handle.routing.counts.clear()
    everyone = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    found.groups = {
        **handle.axes.process_groups(),
        everyone: CollectiveGroup(everyone, "pipeline", tuple(range(handle.world))),
        **{one.group.name: one.group for one in shared.values()},
    }
    return found


def _gradient(found: Tensor | None, shared: SharedGradient | None) -> Tensor | None:
    """A parameter's gradient, of all stages."""
    if shared is None:
        return found
    if found is None:
        # Another holder's stages compute the whole gradient.
        like = shared.value
        found = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=like.device).zero_()
    return collectives.all_reduce(found, shared.group.name)
