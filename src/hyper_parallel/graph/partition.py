"""Partition: cuts the graph of one micro-batch into pipeline stages by its own data flow.

Modules are neither removed nor replaced, so that tied weights, auxiliary losses, encoder-decoders, towers and adapters
need no rules of their own. Each stage becomes one StepGraph with suspension points:

    forward · host "forward" (shows what goes forward) · host "receive" for each gradient that comes back ·
    gradients of inputs · host "input" (shows what goes back) · gradients of weights

Labels, in this order:

1. Forward nodes that depend on the batch and on buffers alone (positions, masks, rotary tables), or on parameters and
   buffers alone (casts, gathered weights), are repeated in each stage that needs them, with every in-place write to
   their storages.
2. The module that a node belongs to gives its stage; of a module that several stages run, what was saved gives that of
   a backward node. Another forward node goes to the last stage of its sources, or to the first of its users; another
   backward node to the first stage of its sources.
3. Values flow forward in the forward pass and back in the backward pass: a node whose module says otherwise follows its
   sources.
4. A value is sent as it is where its use stands. A stage may change its own copy of what it is given; a cut is refused
   where another stage would have to see the change.

A gradient that is a sum of contributions of several stages (tied weights) is left as one contribution per stage, to be
summed once a step.
"""

from __future__ import annotations

import graphlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import fx

from hyper_parallel.errors import GraphError
from hyper_parallel.graph.dependencies import data_sources
from hyper_parallel.graph.gradients import GRADIENT
from hyper_parallel.graph.ir import StepGraph, Value, is_collective, values_of
from hyper_parallel.graph.memory_effects import draws_random, writes
from hyper_parallel.graph.step_context import region_of

_OF_BATCH = frozenset({"input", "buffer", "constant"})
_OF_WEIGHTS = frozenset({"parameter", "buffer", "constant"})
_ADD = torch.ops.aten.add.Tensor

StageOf = Callable[[str], int | None]
"""Module name to its stage; None where the module has no stage."""


@dataclass(frozen=True)
class Crossing:
    """A value that one stage computes and another one uses."""

    node: str
    """The node that computes it, by its name in the graph of the micro-batch."""
    source: int
    target: int
    direction: Literal["forward", "backward"]
    value: Value
    written_by: str
    """The node after which the value is what the other stage uses: the one that computes it, or the last that changes
    it before its use."""
    place: int | None = None
    """Among the values that cross from `source` to `target`, where they are counted: graphs of the same micro-batch
    under other axes have other nodes."""
    kind: int = 0
    """The number of the kind of micro-batches, where those of a step are of several."""

    @property
    def name(self) -> str:
        value = self.node if self.place is None else self.place
        of_kind = f".{self.kind}" if self.kind else ""
        return f"{self.direction}.{value}.{self.source}-{self.target}{of_kind}"


@dataclass(frozen=True)
class Labels:
    """The stage of each computing node; repeated nodes have none."""

    stage: Mapping[fx.Node, int]
    repeated: frozenset[fx.Node]
    sources: Mapping[fx.Node, frozenset[fx.Node]]
    """Computing nodes to those whose results they use, in-place writers among them."""


def by_modules(assigned: Mapping[str, int]) -> StageOf:
    """The stage of a module is that of the longest prefix of its name in `assigned`.

    >>> stage_of = by_modules({"model.layers.0": 0, "model.layers.1": 1})
    >>> stage_of("model.layers.1.mlp"), stage_of("model.norm")
    (1, None)
    """

    def stage_of(module: str) -> int | None:
        name = module
        while name:
            if name in assigned:
                return assigned[name]
            name = name.rpartition(".")[0]
        return assigned.get("")

    return stage_of


def label(step: StepGraph, stage_of: StageOf, stages: int, *, check_writes: bool = True) -> Labels:
    """The stage of each node.

    Raises GraphError where a stage would have to see memory that another one changes. Without `check_writes` it does
    not: then the labels say where work belongs, and not that the stages could run.
    """
    sources = data_sources(step)
    repeated = repeatable(step, sources)
    found: dict[fx.Node, int] = {}
    nodes = [node for node in step.nodes if node not in repeated]
    forward = [node for node in nodes if not _is_backward(node)]
    users: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        for source in sources[node]:
            users.setdefault(source, []).append(node)
    for node in forward:
        before = [found[source] for source in sources[node] if source in found]
        own = stage_of(node.meta["module"])
        if own is not None or before:
            found[node] = max([*before, *([own] if own is not None else [])])
    for node in reversed(forward):
        if node not in found:
            after = [found[user] for user in users.get(node, ()) if user in found and not _is_backward(user)]
            found[node] = min(after, default=0)
    run_in: dict[str, set[int]] = {}
    """Modules to the stages that have forward nodes of theirs."""
    for node in forward:
        run_in.setdefault(node.meta["module"], set()).add(found[node])
    for node in nodes:
        if not _is_backward(node):
            continue
        behind = [found[source] for source in sources[node] if source in found and _is_backward(source)]
        saved = [found[source] for source in sources[node] if source in found and not _is_backward(source)]
        own = stage_of(node.meta["module"])
        if own is None:
            own = min(behind) if behind else max(saved, default=stages - 1)
        elif len(ran := run_in.get(node.meta["module"], {own})) > 1:
            # A module that several stages run has a backward pass in each.
            own = (
                max(saved)
                if saved
                else max((one for one in ran if not behind or one <= min(behind)), default=own)
            )
        found[node] = min([own, *behind])
    labels = Labels(found, repeated, sources)
    if check_writes:
        _check_writes(step, labels)
    return labels


def _is_backward(node: fx.Node) -> bool:
    return bool(region_of(node).phase == "backward")


def repeatable(step: StepGraph, sources: Mapping[fx.Node, Collection[fx.Node]]) -> frozenset[fx.Node]:
    """Forward nodes that the batch and buffers decide, as masks; and that parameters and buffers do, as gathers."""
    lasting = {storage: entry.kind for storage, entry in step.outside.items()}
    writers: dict[int, list[fx.Node]] = {}
    for node in step.nodes:
        for storage in writes(node):
            writers.setdefault(storage, []).append(node)
    kinds: dict[fx.Node, frozenset[str]] = {}
    """What decides a node, by kind."""
    for node in step.nodes:
        if _is_backward(node) or draws_random(node) or not all(source in kinds for source in sources[node]):
            continue
        given = {
            value.storage
            for source in node.all_input_nodes
            if source.op == "placeholder"
            for value in values_of(source)
        }
        decided = frozenset(str(lasting.get(storage)) for storage in given).union(
            *(kinds[source] for source in sources[node])
        )
        one_of = _OF_BATCH if "parameter" not in decided else _OF_WEIGHTS
        if (
            decided <= one_of
            and given.isdisjoint(writers)
            and (one_of is _OF_WEIGHTS or not is_collective(node))
        ):
            kinds[node] = decided
    found = set(kinds)
    while True:
        spoiled = {storage for storage, nodes in writers.items() if any(node not in found for node in nodes)}
        gone = {
            node
            for node in found
            if any(value.storage in spoiled for value in values_of(node))
            or any(source.op == "call_function" and source not in found for source in sources[node])
        }
        if not gone:
            return frozenset(found)
        found -= gone


def _check_writes(step: StepGraph, labels: Labels) -> None:
    """Raise GraphError where a stage would use memory as it was before another stage changed it.

    A stage has a copy of what it was given. So another stage sees a change only if it is given its result, and nobody
    does in what outlives the micro-batch.
    """
    users: dict[int, dict[int, fx.Node]] = {}
    wrote: dict[int, fx.Node] = {}
    arrived: dict[tuple[fx.Node, int, int], fx.Node | None] = {}
    """Value, storage and stage to the last write before that stage was given the value, or what it is a view of."""
    for node in step.nodes:
        stage = labels.stage.get(node)
        if stage is None:
            continue
        for source in node.all_input_nodes:
            for storage in {value.storage for value in values_of(source)}:
                writer = wrote.get(storage)
                if storage in step.outside:
                    users.setdefault(storage, {}).setdefault(stage, node)
                    continue
                given = writer if labels.stage.get(source, stage) != stage else None
                known = arrived.setdefault((source, storage, stage), given)
                arrived.setdefault((node, storage, stage), known)
                if writer is not None and writer is not known and labels.stage[writer] != stage:
                    raise _refusal(writer, node, labels)
        wrote.update(dict.fromkeys(writes(node), node))
    for storage, writer in wrote.items():
        for stage, user in users.get(storage, {}).items():
            if stage != labels.stage[writer]:
                raise _refusal(writer, user, labels)


def _refusal(writer: fx.Node, user: fx.Node, labels: Labels) -> GraphError:
    return GraphError(
        f"no pipeline can be cut here: {_where(writer)} in stage {labels.stage[writer]} writes to memory that "
        f"{_where(user)} in stage {labels.stage[user]} uses; put both modules in one stage"
    )


def _where(node: fx.Node) -> str:
    module = node.meta["module"]
    return f"{node.target} of {module}" if module else str(node.target)


def crossings(
    step: StepGraph, labels: Labels, wanted: Collection[fx.Node], *, kind: int | None = None
) -> list[Crossing]:
    """The values that cross between stages, in the order in which they are used. `wanted`: the nodes that count.
    `kind`: the number of the kind of micro-batches; the values' names are then their places."""
    found: dict[tuple[fx.Node, int], Crossing] = {}
    wrote: dict[int, fx.Node] = {}
    changed: set[tuple[int, int]] = set()
    """Stages and the storages that they write to."""
    for node in step.nodes:
        target = labels.stage.get(node)
        if target is None:
            continue
        for source in node.all_input_nodes if node in wanted else ():
            start = labels.stage.get(source)
            if start is None or start == target:
                continue
            if (source, target) not in found:
                found[source, target] = _crossing(source, start, node, target, wrote)
        for storage in writes(node):
            wrote[storage] = node
            changed.add((target, storage))
    seen: dict[tuple[int, int], Crossing] = {}
    for (source, target), one in found.items():
        place = target, one.value.storage
        if seen.setdefault(place, one) is not one and place in changed:
            raise GraphError(
                f"no pipeline can be cut here: {_where(source)} gives stage {target} one tensor in two shapes, and "
                "that stage changes one; put both modules in one stage"
            )
    return list(found.values()) if kind is None else _counted(found.values(), kind)


def _counted(crossing: Iterable[Crossing], kind: int) -> list[Crossing]:
    seen: Counter[tuple[int, int]] = Counter()
    stages = []
    for one in crossing:
        stages.append(replace(one, place=seen[one.source, one.target], kind=kind))
        seen[one.source, one.target] += 1
    return stages


def _crossing(
    source: fx.Node, start: int, node: fx.Node, target: int, wrote: Mapping[int, fx.Node]
) -> Crossing:
    """The values that `node` of stage `target` takes from stage `start`, as the writes so far have left it."""
    direction: Literal["forward", "backward"] = "forward" if start < target else "backward"
    if direction == "forward" and _is_backward(source):
        raise GraphError(
            f"no pipeline can be cut here: {_where(node)} in stage {target} needs what the backward pass of stage "
            f"{start} computes"
        )
    value = source.meta.get("value")
    if not isinstance(value, Value):
        raise GraphError(
            f"no pipeline can be cut here: {_where(source)} gives stage {target} no single tensor"
        )
    if not all(isinstance(size, int) for size in value.shape):
        raise GraphError(
            f"no pipeline can be cut here: {_where(source)} gives stage {target} a tensor whose size depends on the "
            "data; cut between layers"
        )
    writer = wrote.get(value.storage)
    return Crossing(source.name, start, target, direction, value, writer.name if writer else source.name)


def contributions(step: StepGraph, labels: Labels) -> dict[str, list[fx.Node]]:
    """Each output to the nodes that give it: of a gradient that stages have parts in, one node for each part."""
    found: dict[str, list[fx.Node]] = {}
    for name, node in step.returned.items():
        found[name] = summands(node, labels) if name.startswith(GRADIENT) else [node]
    return found


def summands(node: fx.Node, labels: Labels) -> list[fx.Node]:
    """The summands of a gradient where they come from several stages; otherwise the gradient itself."""
    if node.target is not _ADD or node.kwargs or len(node.args) != 2:
        return [node]
    parts: list[fx.Node] = []
    for one in node.args:
        if not isinstance(one, fx.Node):
            return [node]
        parts += summands(one, labels)
    stages = [labels.stage.get(part) for part in parts]
    return parts if len(set(stages)) > 1 else [node]


def part_order(step: StepGraph, part_of: StageOf, names: Sequence[str]) -> list[int]:
    """The parts that compute anything, each behind those whose values it uses; of several orders the one nearest to
    that of `names`.

    Raises GraphError where two parts need each other's values.
    """
    sources = data_sources(step)
    repeated = repeatable(step, sources)
    reached: dict[fx.Node, frozenset[int]] = {}
    """Of each forward node: its part, or, of one between parts, those whose values it has."""
    before: dict[int, set[int]] = {}
    for node in step.nodes:
        if region_of(node).phase == "backward" or node in repeated:
            continue
        given = frozenset[int]().union(*(reached.get(source, frozenset()) for source in sources[node]))
        part = part_of(node.meta["module"])
        reached[node] = given if part is None else frozenset({part})
        if part is not None:
            before.setdefault(part, set()).update(given - {part})
    sorter = graphlib.TopologicalSorter(before)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        cycle = [names[part] for part in error.args[1]]
        raise GraphError(
            f"{' and '.join(sorted(set(cycle)))} need each other's values in the forward pass; put what joins them in "
            "one submodel"
        ) from None
    found: list[int] = []
    ready: list[int] = []
    while sorter.is_active():
        ready = sorted([*ready, *sorter.get_ready()])
        found.append(ready.pop(0))
        sorter.done(found[-1])
    return found
