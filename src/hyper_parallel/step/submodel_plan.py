"""Plans the submodels of a run: each device group captures a micro-batch of the whole model under its own axes, and
takes its own part of the graph.

The parts fit together where all groups find the same values between them. A value has whole tensors on ranks that
see all rows of a micro-batch, and a part of its rows on those that see some: the dim of the rows is the one that grows
with them. A submodel with a pipeline has a part of the graph for each of its places; one that a micro-batch does not
need has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hyper_parallel.compat.process_groups import gather_objects
from hyper_parallel.errors import GraphError, StrategyError
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.guards import Question, Questions
from hyper_parallel.graph.partition import Crossing, StageOf, part_order
from hyper_parallel.graph.stage_cut import balanced_counts, flops_cost, layer_stages
from hyper_parallel.layout import Layout
from hyper_parallel.runtime.stage_costs import stage_costs
from hyper_parallel.schedule import Costs
from hyper_parallel.shard.model_structure import layers_or_refuse
from hyper_parallel.shard.process_mesh import DATA_AXES, PipelinePlace
from hyper_parallel.step.batches import MicroBatch
from hyper_parallel.step.capture_micro_batch import (
    ForwardOutputs,
    capture_evaluation,
    capture_micro_batch_like,
    fields_of,
)
from hyper_parallel.step.micro_batch import blank_like
from hyper_parallel.step.pipeline_stages import PipelineStages
from hyper_parallel.step.recipe import GradientRecipe
from hyper_parallel.step.stage_plan import (
    StagePlan,
    captured_or_refused,
    cut_micro_batch,
    memory_passes,
    owners_of,
)

_Capture = Callable[[MicroBatch, bool], tuple[StepGraph, list[Question]]]
"""Of rows, which may hold several documents."""
_COSTS = ("forward", "backward", "input", "weight", "saved", "released")


@dataclass(frozen=True)
class _Value:
    """A value that crosses, as one group has it."""

    name: str
    shape: tuple[int, ...]
    """Whole."""
    dims: tuple[tuple[str, ...], ...]
    """As of Layout."""
    dtype: str


@dataclass(frozen=True)
class _Found:
    """What a rank has found, for the others."""

    values: tuple[_Value, ...]
    costs: Mapping[str, float]
    """Of its group's own stage; none where that has nothing to compute."""
    users: Mapping[str, tuple[int, ...]]
    """Parameter or buffer to the stages that use it."""


class SubmodelPlanner:
    """Plans on the shadow of a run's model, which has no values and was parallelized by this group's axes."""

    def __init__(self, shadow: GradientRecipe, parts: Parts, device: torch.device | str) -> None:
        place = shadow.handle.pipeline
        assert place is not None, "the shadow was parallelized for a place among others"
        self.place: PipelinePlace = place
        self._shadow, self._parts, self._device = shadow, parts, device
        self._kinds = 0
        self._layer_counts: dict[int, tuple[int, ...]] = {}
        """By submodel with a pipeline: the layers of each stage, by the first micro-batches that needed it."""

    def training(self, micro: MicroBatch, doubled: MicroBatch, count: int) -> StagePlan:
        """The plan of micro-batches like `micro`, this rank's rows of one, where a step has `count` of all kinds.
        `doubled`: twice as many rows. A collective; raises StrategyError."""

        return self._planned(
            micro,
            doubled,
            lambda rows, documents: capture_micro_batch_like(
                self._shadow, rows, count, documents=documents, device=self._device
            ),
            trains=True,
        )

    def forward(self, micro: MicroBatch, doubled: MicroBatch, outputs: ForwardOutputs) -> StagePlan:
        """As `training`, of forward passes without gradients."""

        def capture(rows: MicroBatch, documents: bool) -> tuple[StepGraph, list[Question]]:
            questions, blank = Questions(fields_of(rows)), partial(blank_like, rows, self._device)
            step = capture_evaluation(
                self._shadow, blank, outputs, documents=documents, device=self._device, questions=questions
            )
            return step, questions.asked

        return self._planned(micro, doubled, capture, trains=False)

    def _planned(
        self, micro: MicroBatch, doubled: MicroBatch, capture: _Capture, *, trains: bool
    ) -> StagePlan:
        def captured(rows: MicroBatch) -> tuple[StepGraph, list[Question]]:
            return captured_or_refused(
                lambda: capture(rows, documents), "submodels: the model's step cannot be captured"
            )

        self._kinds += 1
        documents = any(gather_objects(bool(micro.several)))
        whole, questions = captured(micro)
        cut = self._agreed_cut(whole)
        stages = cut.stages(whole, self._shadow)
        values = self._values(stages, cut, lambda: captured(doubled)[0])
        users = {name: tuple(sorted(found)) for name, found in stages.users.items()}
        found = _Found(tuple(values), self._costs(stages, whole, cut), users)
        by_rank = gather_objects(found)
        self._check(by_rank)
        firsts = [by_rank[group.ranks[0]] for group in self.place.groups]
        layouts = self._layouts(firsts)
        costs = [firsts[group].costs for group in cut.groups]
        return StagePlan(
            stages,
            tuple(cut.groups),
            owners_of(stages, cut.groups, self._home),
            described=tuple(self._line(one, layouts[one.name], cut) for one in crossings(stages)),
            trains=trains,
            costs=Costs(**{key: tuple(one[key] for one in costs) for key in _COSTS}),  # type: ignore[arg-type]
            layouts=layouts,
            questions=questions,
            documents=documents,
        )

    def _agreed_cut(self, whole: StepGraph) -> Cut:
        """The cut of this rank's graph as the first ranks of all groups have it. A collective."""
        parts = self._parts
        try:
            order = part_order(whole, parts.part_of, parts.names)
        except GraphError as error:
            raise StrategyError(f"submodels: {error}") from error
        counts = [self._counts(whole, part) if part in order else () for part in range(len(parts.names))]
        orders = gather_objects((order, counts))
        for rank, (other, _) in enumerate(orders):
            if other != orders[0][0]:
                needs = [" → ".join(parts.names[part] for part in found) for found in (orders[0][0], other)]
                raise StrategyError(
                    f"submodels: rank 0's rows need {needs[0]}, and those of rank {rank} need {needs[1]}; see that "
                    "all ranks' rows of a micro-batch need the same submodels"
                )
        firsts = [orders[self.place.groups[parts.group(part)].ranks[0]] for part in range(len(parts.names))]
        for part in order:
            self._layer_counts.setdefault(part, firsts[part][1][part])
        agreed = [self._layer_counts.get(part, ()) for part in range(len(parts.names))]
        return Cut(parts, order, agreed, self._layers(), self._kinds, whole)

    def _layers(self) -> str:
        if max(self._parts.pipelines) == 1:
            return ""
        return layers_or_refuse(self._shadow.model, "axes.pipeline of a submodel")[0]

    def _counts(self, whole: StepGraph, part: int) -> tuple[int, ...]:
        """The layers of each stage of a submodel; none where it has one stage."""
        parts, layers = self._parts, self._layers()
        if parts.pipelines[part] == 1:
            return ()
        if parts.part_of(layers) != part:
            raise StrategyError(
                f"submodels.{parts.names[part]}: axes.pipeline cuts the decoder's layers ({layers}), which belong to "
                f"{parts.names[parts.part_of(layers) or 0]}; set it there"
            )
        cost = flops_cost(whole)
        return balanced_counts(
            whole,
            layers,
            parts.pipelines[part],
            lambda node: cost(node) if parts.part_of(node.meta["module"]) == part else 0.0,
        )

    def _values(self, stages: PipelineStages, cut: Cut, doubled: Callable[[], StepGraph]) -> list[_Value]:
        """The values that cross, as this group has them. `doubled`: captures twice the rows."""
        data = self.place.devices.mesh.size(DATA_AXES)
        single = crossings(stages)
        if data == 1:
            return [
                _Value(one.name, one.value.shape, ((),) * len(one.value.shape), str(one.value.dtype))
                for one in single
            ]
        whole = doubled()
        twice = crossings(cut.of(whole).stages(whole, self._shadow))
        if [one.name for one in single] != [one.name for one in twice]:
            raise StrategyError("submodels: with twice the rows other values cross between the submodels")
        return [_of_rows(one, more, data) for one, more in zip(single, twice, strict=True)]

    def _costs(self, stages: PipelineStages, whole: StepGraph, cut: Cut) -> dict[str, float]:
        if self.place.index not in cut.groups:
            return {}
        costs, own = stage_costs(stages.partition, flops_cost(whole)), cut.groups.index(self.place.index)
        return {key: getattr(costs, key)[own] for key in _COSTS}

    def _check(self, found: Sequence[_Found]) -> None:
        """All ranks have cut the same model at the same places."""
        first, home = found[0], self._name(0)
        for rank, one in enumerate(found):
            name = self._name(rank)
            if [value.name for value in one.values] != [value.name for value in first.values]:
                raise StrategyError(
                    f"submodels: on ranks of {home} and {name} other values cross between the submodels; choose other "
                    "modules, or other axes"
                )
            for value, other in zip(one.values, first.values, strict=True):
                if (value.shape, value.dtype) != (other.shape, other.dtype):
                    raise StrategyError(
                        f"submodels: {value.name} is {list(other.shape)} {other.dtype} in {home} (rank 0) and "
                        f"{list(value.shape)} {value.dtype} in {name} (rank {rank}): where submodels meet, values can "
                        "be split by rows alone, and evenly; choose other modules, leave context, sequence and other "
                        "precisions out, and give each data rank as much (images) as the others"
                    )
            if one.users != first.users:
                raise StrategyError(
                    f"submodels: on ranks of {home} and {name} other submodels use some weights; choose other modules, "
                    "or other axes"
                )

    def _name(self, rank: int) -> str:
        return next(group.name for group in self.place.groups if rank in group.ranks)

    def _layouts(self, found: Sequence[_Found]) -> dict[str, dict[str, Layout]]:
        """Of each value, in each group."""
        made: dict[str, dict[str, Layout]] = {}
        for group, one in zip(self.place.groups, found, strict=True):
            for value in one.values:
                layout = Layout(group.mesh, value.shape, value.dims)
                made.setdefault(value.name, {})[group.name] = layout
        return made

    def _home(self, name: str) -> int:
        """The group of a parameter or buffer that nothing uses: its module's."""
        return self._parts.group(self._parts.part_of(name.rpartition(".")[0]) or 0)

    def _line(self, one: Crossing, layouts: Mapping[str, Layout], cut: Cut) -> str:
        source, target = (self.place.groups[cut.groups[stage]].name for stage in (one.source, one.target))
        what = "gradient" if one.direction == "backward" else "value"
        return f"{what} {layouts[source]} of {source} to {layouts[target]} of {target}"


def _of_rows(one: Crossing, twice: Crossing, data: int) -> _Value:
    """A value whose rows are split over `data` ranks; a capture of twice the rows shows which dim they are."""
    shape, more = one.value.shape, twice.value.shape
    grown = [dim for dim, (size, other) in enumerate(zip(shape, more, strict=False)) if size != other]
    if len(shape) != len(more) or len(grown) > 1 or any(more[dim] != 2 * shape[dim] for dim in grown):
        raise StrategyError(
            f"submodels: {one.name} is {list(shape)}, and {list(more)} with twice the rows, so that it cannot be split "
            "by rows; give the submodels axes without replicate and shard"
        )
    whole = tuple(size * data if dim in grown else size for dim, size in enumerate(shape))
    dims = tuple((DATA_AXES,) if dim in grown else () for dim in range(len(shape)))
    return _Value(one.name, whole, dims, str(one.value.dtype))


@dataclass(frozen=True)
class Parts:
    """The submodels of a model, in the order of their declaration."""

    names: tuple[str, ...]
    pipelines: tuple[int, ...]
    """The degree of each one's pipeline."""
    part_of: StageOf
    """Module to the place of its submodel."""

    def group(self, part: int, place: int = 0) -> int:
        """The place among all device groups of that at a place of a submodel's pipeline."""
        return sum(self.pipelines[:part]) + place

    def of_group(self, group: int) -> tuple[int, int]:
        """The submodel of a device group, and its place in that one's pipeline."""
        part = next(part for part in range(len(self.names)) if group < self.group(part + 1))
        return part, group - self.group(part)


class Cut:
    """The stage of each module of a graph."""

    def __init__(
        self,
        parts: Parts,
        order: Sequence[int],
        counts: Sequence[tuple[int, ...]],
        layers: str,
        kind: int,
        whole: StepGraph,
    ) -> None:
        """`kind`: the number of the kind of micro-batches, the same on all ranks. `order`: of the submodels that the
        graph computes with; `counts`: layers of each stage of each submodel, none without a pipeline; `layers`: the
        name of their list."""
        self._parts, self._order, self._counts, self._layers = parts, order, counts, layers
        self._kind = kind
        self.groups = [parts.group(part, place) for part in order for place in range(parts.pipelines[part])]
        """The device group of each stage."""
        self._inner = {
            part: layer_stages(layers, found, whole)
            for part, found in enumerate(counts)
            if found and part in order
        }

    def of(self, whole: StepGraph) -> Cut:
        """The same cut of another graph."""
        return Cut(self._parts, self._order, self._counts, self._layers, self._kind, whole)

    def stage_of(self, module: str) -> int | None:
        """The stage of a module; None where the data flow decides."""
        part = self._parts.part_of(module)
        if part is None or part not in self._order:
            return None
        first = self.groups.index(self._parts.group(part))
        if part not in self._inner:
            return first
        place = self._inner[part](module)
        return None if place is None else first + place

    def stages(self, whole: StepGraph, shadow: GradientRecipe) -> PipelineStages:
        """The stages of a graph. Raises StrategyError."""
        strategy = shadow.handle.strategy

        def refused(error: GraphError) -> str:
            names = ", ".join(
                f"{stage} {self._parts.names[self._parts.of_group(group)[0]]}"
                for stage, group in enumerate(self.groups)
            )
            return f"submodels: {error} (stages: {names})"

        passes = memory_passes(shadow.model, strategy)
        return cut_micro_batch(
            whole, self.stage_of, len(self.groups), strategy, passes, kind=self._kind, refused=refused
        )


def crossings(stages: PipelineStages) -> list[Crossing]:
    """The values that cross between stages."""
    return [one for stage in stages.partition.stages for one in (*stage.sends, *stage.gradients_out)]
