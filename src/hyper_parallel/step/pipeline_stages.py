"""Cuts a captured micro-batch into the graphs that a pipeline runs.

    gather        each rank, once a step      parameters to the weights that its stages compute with
    stages        each micro-batch            forward and backward pass (`graph.stage_graph`)
    reduce        each rank, once a step      sums of gradients over the micro-batches, over shards and copies

What runs once a step is what `memory.shard` has run once a step (`shard.saved_gathers`), and for a weight of several
stages always: its gradient is one part for each stage, and they are summed at the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.dependencies import Needs, needed, seen_through, sources, stops
from hyper_parallel.graph.gradients import GRADIENT, UNREDUCED, UNSUMMED, GradientSums, gradient_sums
from hyper_parallel.graph.graph_writer import subgraph
from hyper_parallel.graph.partition import Labels, StageOf, contributions, label
from hyper_parallel.graph.stage_graph import Partition, partition
from hyper_parallel.step.micro_batch import WEIGHT
from hyper_parallel.strategy.memory import ShardLevel

_PART = "#"
"""Between a parameter's name and the number of a part of its gradient."""


@dataclass(frozen=True)
class PipelineStages:
    """The graphs of a pipeline's stages, and what each holds."""

    whole: StepGraph
    """The captured micro-batch."""
    partition: Partition
    weights: Mapping[str, fx.Node]
    """Inputs of the stages that are gathered once a step, by name, and the nodes of `whole` that give them."""
    sums: Mapping[str, fx.Node]
    """Outputs of the stages that are reduced once a step, by name, and the nodes of `whole` that give them."""
    reduced: Mapping[str, tuple[fx.Node, ...]]
    """Parameter to the parts of its gradient that `sums` come to."""
    needs: Needs
    """Data flow of `whole`."""
    stop: frozenset[fx.Node]
    """Nodes behind which `reduce` needs nothing."""
    users: Mapping[str, frozenset[int]]
    """Parameter or buffer, as ``parameter.<name>``, to the stages that use it, or have a part in its gradient."""

    def gather(self, stages: Collection[int]) -> StepGraph | None:
        """What is gathered for these stages: outputs ``weight.<n>``; None where nothing is."""
        used = self._inputs(stages)
        wanted = {name: node for name, node in self.weights.items() if name in used}
        return subgraph(self.whole, wanted, {}, "parameter", "forward", needs=self.needs) if wanted else None

    def reduce(self, stages: Collection[int]) -> StepGraph | None:
        """What makes gradients of sums, which are its inputs; `parameter_of` knows its outputs.

        None where nothing is reduced once a step.
        """
        known = {name for number in stages for name in self.partition.stages[number].step.outputs}
        mine = {node for name, node in self.sums.items() if name in known}
        wanted = {
            f"{name}{_PART}{place}": part
            for name, parts in self.reduced.items()
            for place, part in enumerate(parts)
            if self._needs(part) & mine
        }
        # Also the sums of other stages that these parts need: they are zero here.
        given = {node: name for name, node in self.sums.items()}
        return (
            subgraph(self.whole, wanted, given, "gradient", "backward", needs=self.needs) if wanted else None
        )

    def _needs(self, part: fx.Node) -> frozenset[fx.Node]:
        ends = set(self.sums.values())
        return frozenset((sources(needed(self.needs, [part], self.stop)) | {part}) & ends)

    def _inputs(self, stages: Collection[int]) -> set[str]:
        return {entry.name for number in stages for entry in self.partition.stages[number].step.inputs}


def parameter_of(output: str) -> str:
    """The parameter that an output of `PipelineStages.reduce` is a part of the gradient of."""
    return output.rpartition(_PART)[0]


def pipeline_stages(
    whole: StepGraph,
    stage_of: StageOf,
    stages: int,
    level: ShardLevel,
    rewrite: Callable[[StepGraph], StepGraph] = lambda step: step,
    *,
    kind: int | None = None,
) -> PipelineStages:
    """Cut what `capture_micro_batch` gave. `level`: of `memory.shard`; `rewrite`: passes on the part of a micro-batch.
    `kind`: as of `crossings`.

    Raises GraphError where the data flow allows no such stages.
    """
    labels = label(whole, stage_of, stages)
    needs = labels.sources
    nodes = whole.returned
    parts = contributions(whole, labels)
    weights = {
        name: seen_through(node)
        for name, node in nodes.items()
        if name.startswith(WEIGHT) and (level != "parameters" or len(_using(node, labels)) > 1)
    }
    cut_at = gradient_sums(
        nodes, parts, needs, lambda name: level == "optimizer" or len(_stages(parts[name], labels)) > 1
    )
    each_time = {
        name: node
        for name, node in nodes.items()
        if not name.startswith((WEIGHT, UNREDUCED, UNSUMMED))
        and name.removeprefix(GRADIENT) not in cut_at.reduced
    }
    given = {node: name for name, node in weights.items()}
    wanted = {**each_time, **cut_at.sums}
    micro = rewrite(subgraph(whole, wanted, given, "parameter", "forward", effects=True, needs=needs))
    stop = stops(needs, set(cut_at.sums.values()))
    cut = partition(micro, stage_of, stages, kind=kind)
    users = _users(whole, needs, cut, weights)
    for name, number in _gradients(cut, cut_at, needs, stop):
        users.setdefault(f"parameter.{name}", set()).add(number)
    held = {name: frozenset(stages) for name, stages in users.items()}
    return PipelineStages(whole, cut, weights, cut_at.sums, cut_at.reduced, needs, stop, held)


def _stages(nodes: Collection[fx.Node], labels: Labels) -> set[int]:
    return {labels.stage[node] for node in nodes if node in labels.stage}


def _using(node: fx.Node, labels: Labels) -> set[int]:
    """The stages that use a weight, or what is made of it wherever it is used."""
    left, seen = list(node.users), set(node.users)
    while left:
        one = left.pop()
        more = [user for user in one.users if user not in seen] if one in labels.repeated else []
        seen.update(more)
        left += more
    return _stages(seen, labels)


def _users(
    whole: StepGraph, needs: Needs, cut: Partition, weights: Mapping[str, fx.Node]
) -> dict[str, set[int]]:
    """Each parameter and buffer to the stages whose graphs, or whose gathers, take it."""
    known = {node: entry for entry, node in zip(whole.inputs, whole.placeholders, strict=True)}
    gathered = {
        name: {known[one].name for one in sources(needed(needs, [weight])) | {weight} if one in known}
        for name, weight in weights.items()
    }
    found: dict[str, set[int]] = {
        entry.name: set() for entry in whole.inputs if entry.kind in ("parameter", "buffer")
    }
    for stage in cut.stages:
        for entry in stage.step.inputs:
            for name in gathered.get(entry.name, {entry.name}) & found.keys():
                found[name].add(stage.number)
    return found


def _gradients(
    cut: Partition, cut_at: GradientSums, needs: Needs, stop: Collection[fx.Node]
) -> Iterator[tuple[str, int]]:
    """Parameters and the stages that have a part in their gradients, which need not compute with them: the gradient of
    a product's factor is made of the other one."""
    ends = set(cut_at.sums.values())
    made_of = {
        name: {one for part in parts for one in (sources(needed(needs, [part], stop)) | {part}) & ends}
        for name, parts in cut_at.reduced.items()
    }
    for stage in cut.stages:
        outputs = set(stage.step.outputs)
        given = {node for name, node in cut_at.sums.items() if name in outputs}
        yield from ((name, stage.number) for name, nodes in made_of.items() if nodes & given)
        for output in stage.step.outputs:
            if output.startswith(GRADIENT) and output not in cut_at.sums:
                yield output.removeprefix(GRADIENT), stage.number
