"""Where the graph of a micro-batch is cut into submodels, and these into the stages of their pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hyper_parallel.errors import GraphError, StrategyError
from hyper_parallel.graph import StepGraph, rewritten
from hyper_parallel.graph.partition import Crossing, StageOf
from hyper_parallel.graph.stage_cut import layer_stages
from hyper_parallel.shard.activation_checkpointing import recomputed_modules
from hyper_parallel.shard.graph_passes import recompute_pass, regather_pass
from hyper_parallel.step.pipeline_stages import PipelineStages, pipeline_stages
from hyper_parallel.step.recipe import GradientRecipe


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

        def rewrite(step: StepGraph) -> StepGraph:
            again = recomputed_modules(shadow.model, strategy)
            found = [recompute_pass(strategy, again), regather_pass(strategy)]
            return rewritten(step, [one for one in found if one is not None])

        try:
            return pipeline_stages(
                whole, self.stage_of, len(self.groups), strategy.memory.shard, rewrite, kind=self._kind
            )
        except GraphError as error:
            names = ", ".join(
                f"{stage} {self._parts.names[self._parts.of_group(group)[0]]}"
                for stage, group in enumerate(self.groups)
            )
            raise StrategyError(f"submodels: {error} (stages: {names})") from error


def crossings(stages: PipelineStages) -> list[Crossing]:
    """The values that cross between stages."""
    return [one for stage in stages.partition.stages for one in (*stage.sends, *stage.gradients_out)]
