"""Stages of a run's pipeline as graphs: one micro-batch, captured on one rank of a stage's mesh and cut.

Stages between the first and the last one that have layers of the same kinds in the same order are alike, so that one
is captured for all of them: the model is made smaller to the layers of stages that differ. Where what crosses is not
between neighbours, or the layers are not known by kind, all layers are captured.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from torch import nn

from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.config import RunConfig
from hyper_parallel.errors import ConfigError, GraphError, StrategyError
from hyper_parallel.estimate.prediction import count_micro_batches, micro_batch
from hyper_parallel.estimate.step_figures import Resident, resident_of
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.partition import Crossing
from hyper_parallel.graph.pass_manager import rewritten
from hyper_parallel.graph.stage_cut import NodeCost, balanced_cut, check_inner, layer_costs, layer_stages
from hyper_parallel.graph.stage_graph import Partition, Stage
from hyper_parallel.graph.step_context import current_step
from hyper_parallel.offloading.pass_pipeline import passes
from hyper_parallel.schedule import stages_of
from hyper_parallel.shard import parallelize, sharded
from hyper_parallel.shard.layer_kinds import layer_kinds, layers_in, with_layers
from hyper_parallel.shard.model_structure import layers_or_refuse
from hyper_parallel.shard.plan import Plan, make_plan
from hyper_parallel.step.capture_micro_batch import capture_micro_batch, without_boundaries
from hyper_parallel.step.capture_train_step import MicroBatchShape, capture_one
from hyper_parallel.step.engine import check_length
from hyper_parallel.step.pipeline_stages import PipelineStages, pipeline_stages
from hyper_parallel.step.recipe import Recipe
from hyper_parallel.strategy import Memory, Strategy, recomputed_layers

PARAMETER = "parameter."
"""How the names of a graph's inputs that are parameters begin."""
Say = Callable[[str], None]
CostOf = Callable[[StepGraph], NodeCost]
"""A graph to what its nodes cost."""


@dataclass(frozen=True)
class CapturedStages:
    """The stages of a pipeline, those that are alike once."""

    counts: tuple[int, ...]
    """Layers of each stage."""
    given: bool
    """Whether the run file has these counts; otherwise they were balanced by cost."""
    stages_apart: PipelineStages
    """The graphs of the stages that differ, as training cuts them."""
    captured: tuple[int, ...]
    """Of each stage, its place among them."""
    resident: Mapping[str, Resident]
    """By the names of the captured model's parameters, what one rank keeps."""
    update: StepGraph
    """A whole step of the captured model, which has clipping and the update."""
    model: nn.Module
    """The captured model, parallelized on one rank of a stage's mesh."""
    plan: Plan

    @property
    def stages(self) -> int:
        """Stages of all ranks together."""
        return len(self.counts)

    @property
    def partition(self) -> Partition:
        """The parts of a micro-batch in the stages that differ."""
        return self.stages_apart.partition

    @property
    def users(self) -> Mapping[str, frozenset[int]]:
        """Each parameter, by name, to the captured stages that use it or have a part in its gradient."""
        found = self.stages_apart.users.items()
        return {name.removeprefix(PARAMETER): stages for name, stages in found if name.startswith(PARAMETER)}

    def parameters(self, stage: Stage) -> list[str]:
        """The names of what a rank of a captured stage holds."""
        return [name for name, stages in self.users.items() if stage.number in stages]

    def all_stages(self) -> tuple[Partition, tuple[Mapping[str, str], ...]]:
        """The stages of all ranks, those that are alike with crossings of their own; and for each, the crossings of the
        captured stage to its own, by name. Raises GraphError where alike stages take other values."""
        stages = [
            replace(self.partition.stages[at], number=number) for number, at in enumerate(self.captured)
        ]
        if len(stages) == len(self.partition.stages):
            whole = tuple({one.name: one.name for one in _crossings(stage)} for stage in stages)
            return self.partition, whole
        names: list[dict[str, str]] = [{} for _ in stages]
        fields: list[dict[str, list[Crossing]]] = [
            {"receives": [], "sends": [], "gradients_in": [], "gradients_out": []} for _ in stages
        ]
        for border, (here, there) in enumerate(itertools.pairwise(stages)):
            for giver, taker, gives, takes, given, taken in (
                (border, border + 1, "sends", "receives", here.sends, there.receives),
                (border + 1, border, "gradients_out", "gradients_in", there.gradients_out, here.gradients_in),
            ):
                for one, other in _matched(given, taken):
                    crossing = replace(one, source=giver, target=taker)
                    names[giver][one.name] = names[taker][other.name] = crossing.name
                    fields[giver][gives].append(crossing)
                    fields[taker][takes].append(crossing)
        placed = (
            replace(stage, **{name: tuple(own) for name, own in mine.items()})  # type: ignore[arg-type]
            for stage, mine in zip(stages, fields, strict=True)
        )
        return Partition(tuple(placed), {}), tuple(names)

    def once(self, stage: Stage) -> tuple[StepGraph | None, StepGraph | None]:
        """What a captured stage gathers before its first micro-batch, and reduces after its last one."""
        return self.stages_apart.gather([stage.number]), self.stages_apart.reduce([stage.number])


def _crossings(stage: Stage) -> tuple[Crossing, ...]:
    return (*stage.receives, *stage.sends, *stage.gradients_in, *stage.gradients_out)


def _matched(given: Sequence[Crossing], taken: Sequence[Crossing]) -> list[tuple[Crossing, Crossing]]:
    """Each value that a stage takes with the first like it that its neighbour gives; others are not sent."""
    left = list(given)
    pairs = []
    for other in taken:
        like = (other.value.shape, other.value.dtype)
        one = next((one for one in left if (one.value.shape, one.value.dtype) == like), None)
        if one is None:
            raise GraphError(
                f"no stage gives {other.name}, {other.value.shape}, to a stage that is like another"
            )
        left.remove(one)
        pairs.append((one, other))
    return pairs


def capture_stages(
    model: nn.Module, config: RunConfig, cost_of: CostOf, say: Say, notes: list[str]
) -> CapturedStages:
    """The stages of a run's pipeline. `model` is on the meta device, and is not changed.

    `cost_of` prices the nodes by which the model is cut, where the file does not say how. To `notes` is added what was
    assumed. Raises StrategyError for a pipeline that cannot be cut, CaptureError for a step that cannot be captured.
    """
    strategy = config.effective_strategy
    of_stage = _kept_whole(strategy.of_stage)
    plan = make_plan(model, of_stage)
    layers, modules = layers_or_refuse(model, "axes.pipeline")
    kinds = layer_kinds(model, plan, of_stage)
    stages = stages_of(strategy.pipeline, strategy.axes.pipeline)
    kind_of = {layer: kind for kind, alike in enumerate(kinds) for layer in alike}
    capture = _Capture(model, plan, config.model_copy(update={"strategy": of_stage}), strategy.memory, say)
    given = strategy.pipeline.layers
    counts = (
        _given(given, stages, len(modules), layers)
        if given is not None
        else _balanced(capture, kinds, kind_of, stages, layers, cost_of)
    )
    again = set(recomputed_layers(strategy.memory, counts))
    alike = _alike(counts, kind_of, again)
    first_of = {place: at for at, place in reversed(list(enumerate(alike)))}
    chosen = [first_of[place] for place in sorted(first_of)]
    starts = [sum(counts[:stage]) for stage in range(stages)]
    keep = [layer for stage in chosen for layer in range(starts[stage], starts[stage] + counts[stage])]
    if plan.layers is not None and len(chosen) < stages:
        local = {place for place, layer in enumerate(keep) if layer in again}
        found = capture.cut(keep, [counts[stage] for stage in chosen], layers, local)
        if _between_neighbours(found.partition):
            notes.append(
                f"{len(keep)} of the {len(modules)} layers were captured, in {len(chosen)} of the {stages} stages; "
                "the others are like one of these"
            )
            return replace(found, counts=counts, given=given is not None, captured=alike)
        say("what crosses is not between neighbours; capturing all layers")
    return replace(capture.cut(None, counts, layers, again), given=given is not None)


def _kept_whole(strategy: Strategy) -> Strategy:
    """The strategy without recomputation: which layers are recomputed is known once the stages are, and these are
    balanced as in training, by the layers' costs without it."""
    memory = strategy.memory.model_copy(update={"recompute": "none", "recompute_layers": None})
    return strategy.model_copy(update={"memory": memory})


def _given(given: Sequence[int], stages: int, layers: int, name: str) -> tuple[int, ...]:
    if len(given) != stages:
        raise StrategyError(
            f"pipeline.layers: {list(given)} has {len(given)} stages, and axes.pipeline · pipeline.virtual = {stages}; "
            f"give {stages} counts, or leave pipeline.layers out"
        )
    check_inner(given)
    if sum(given) != layers:
        raise StrategyError(
            f"pipeline.layers: {list(given)} places {sum(given)} layers, and the model has {layers} ({name}); change "
            f"the counts to sum to {layers}, or leave pipeline.layers out"
        )
    return tuple(given)


def _balanced(
    capture: _Capture,
    kinds: Sequence[Sequence[int]],
    kind_of: Mapping[int, int],
    stages: int,
    layers: str,
    cost_of: CostOf,
) -> tuple[int, ...]:
    """Counts by cost, from one captured layer of each kind."""
    keep = [alike[0] for alike in kinds] or None
    step = capture.micro_batch(keep)
    found = layer_costs(step, layers, cost_of(step))
    costs = [found.layers[kind_of[layer]] for layer in sorted(kind_of)] if keep else found.layers
    return balanced_cut(costs, stages, before=found.before, after=found.after, least=found.least, name=layers)


def _alike(counts: Sequence[int], kind_of: Mapping[int, int], again: Set[int]) -> tuple[int, ...]:
    """Of each stage, the number of the first stage that is like it, of those that differ. What a stage sends to one
    without layers is another value: there the head begins, or the embedding ends."""
    seen: dict[object, int] = {}
    found = []
    start = 0
    for stage, count in enumerate(counts):
        kinds = tuple(
            (kind_of.get(layer, -1 - layer), layer in again) for layer in range(start, start + count)
        )
        end = "first" if stage == 0 else "last" if stage == len(counts) - 1 else ""
        beside = tuple(count == 0 for count in counts[max(stage - 1, 0) : stage + 2])
        found.append(seen.setdefault((end, kinds, beside), len(seen)))
        start += count
    return tuple(found)


def _between_neighbours(found: Partition) -> bool:
    return all(
        abs(one.source - one.target) == 1
        for stage in found.stages
        for one in (*stage.sends, *stage.gradients_out)
    )


class _Capture:
    """Captures a model, or a smaller one with some of its layers, on rank 0 of a stage's mesh."""

    def __init__(self, model: nn.Module, plan: Plan, config: RunConfig, memory: Memory, say: Say) -> None:
        """`config`: of a run of one stage's mesh that recomputes nothing; `memory`: says how it recomputes layers."""
        self._model, self._plan, self._config, self._say = model, plan, config, say
        self._memory = memory
        self._strategy: Strategy = config.strategy

    def micro_batch(self, keep: Sequence[int] | None) -> StepGraph:
        """One micro-batch of the layers `keep`, or of all."""
        model, strategy = self._smaller(keep)
        with fake_ranks(strategy.axes.world, 0), replace(current_step(), even_load=1.0).installed():
            step = without_boundaries(self._captured(self._recipe(model, strategy)))
            return self._rewritten(step, strategy, [])

    def cut(
        self, keep: Sequence[int] | None, counts: Sequence[int], layers: str, again: Set[int]
    ) -> CapturedStages:
        """The stages of the layers `keep`, or of all, with `counts` layers each; of them `again` are recomputed."""
        model, strategy = self._smaller(keep)
        with fake_ranks(strategy.axes.world, 0), replace(current_step(), even_load=1.0).installed():
            recipe = self._recipe(model, strategy)
            shape = MicroBatchShape(micro_batch(self._config), self._config.data.sequence, False)
            whole = capture_one(recipe, shape, 1)
            step = self._captured(recipe)
            recomputed = [f"{layers}.{layer}" for layer in sorted(again)]
            handle = recipe.handle
        return CapturedStages(
            counts=tuple(counts),
            given=False,
            stages_apart=pipeline_stages(
                step,
                layer_stages(layers, counts, step),
                len(counts),
                strategy.memory.shard,
                lambda part: self._rewritten(part, strategy, recomputed),
            ),
            captured=tuple(range(len(counts))),
            resident=resident_of(whole),
            update=whole,
            model=handle.model,
            plan=handle.plan,
        )

    def _smaller(self, keep: Sequence[int] | None) -> tuple[nn.Module, Strategy]:
        found = layers_in(self._model, self._plan)
        total = len(found) if found is not None else 0
        shown = f"{len(keep)} of {total}" if keep is not None and len(keep) < total else "all"
        self._say(f"capturing {shown} layers as rank 0 of {self._strategy.axes.world}")
        if keep is None:
            return copy.deepcopy(self._model), self._strategy
        return with_layers(self._model, self._plan, self._strategy, keep)

    def _recipe(self, model: nn.Module, strategy: Strategy) -> Recipe:
        parallelize(model, strategy, lowering="traceable")
        check_length(sharded(model), self._config)
        return Recipe.of(self._config, model)

    def _captured(self, recipe: Recipe) -> StepGraph:
        step = capture_micro_batch(
            recipe, micro_batch(self._config), self._config.data.sequence, count_micro_batches(self._config)
        )
        self._say(f"{sum(1 for _ in step.nodes):,} nodes captured")
        return step

    def _rewritten(self, step: StepGraph, strategy: Strategy, recomputed: Sequence[str]) -> StepGraph:
        memory = strategy.memory.model_copy(update={"recompute": self._memory.recompute})
        recomputing = strategy.model_copy(update={"memory": memory})
        return rewritten(step, passes(recomputing, ordered=False, recompute=recomputed))


def refuse_unsupported(config: RunConfig, *, explain: bool) -> None:
    """Raise ConfigError for what a simulated pipeline does not have yet."""
    if explain or config.effective_strategy.memory.device is not None:
        raise ConfigError(
            "strategy.memory.device: the budget of a pipeline is planned when it runs, and not predicted yet; leave "
            "the budget (and --explain) out"
        )
