"""Out-of-memory report: the current node, the largest live storages, and remedies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from hyper_parallel.errors import OutOfMemoryError
from hyper_parallel.graph import Kind, Lifetime, StepGraph, lifetimes
from hyper_parallel.graph.step_context import region_of
from hyper_parallel.launch.heartbeat import pulse
from hyper_parallel.shard import ShardedModel
from hyper_parallel.step.graph_cache import Captured
from hyper_parallel.strategy import Strategy
from hyper_parallel.units import format_bytes

_SHOWN = 10
_LOGITS = 0.3
"""Share of the memory alive from which on tensors of the loss are what to begin with."""


def post_mortem(graph: Captured, error: BaseException, handle: ShardedModel, step: int) -> OutOfMemoryError:
    """The error that tells why `step`, counted from 0, ran out of memory where `error` arose."""
    at = ", ".join(filter(None, (f"step {step + 1}", pulse.position())))
    node = graph.executable.node_of(error)
    if node is None:
        return OutOfMemoryError(f"{at}: out of memory outside of the step's graph: {error}")
    said = describe(graph.step, node, handle.strategy, head_of(handle.model))
    return OutOfMemoryError(f"{at}: out of memory {said}")


def head_of(model: nn.Module) -> str | None:
    """The name of the module that gives the logits; None where the model does not tell."""
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    return next((name for name, module in model.named_modules() if module is head), None)


def describe(step: StepGraph, node: fx.Node, strategy: Strategy, head: str | None = None) -> str:
    """The node, what was alive at it, largest first, and the keys of the run file that would make it less."""
    at = list(step.nodes).index(node)
    sizes = dict.fromkeys(step.sizes, 0)
    alive = [life for life in lifetimes(step, sizes) if life.born <= at <= life.died and life.bytes]
    alive.sort(key=lambda life: (-life.bytes, life.storage))
    total = sum(life.bytes for life in alive)
    kinds: Counter[Kind] = Counter()
    for life in alive:
        kinds[life.kind] += life.bytes
    by_kind = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in kinds.most_common())
    lines = [
        f"in {node.target}{_where(node.meta['module'], region_of(node).phase)}, with {format_bytes(total)} of its "
        f"tensors alive ({by_kind})",
        *(_line(life) for life in alive[:_SHOWN]),
    ]
    if len(alive) > _SHOWN:
        rest = sum(life.bytes for life in alive[_SHOWN:])
        lines.append(f"  {format_bytes(rest):>10}  {len(alive) - _SHOWN} more")
    if step.sizes:
        lines.append("  tensors whose size depends on the data, such as experts' rows, are not counted")
    lines.append(f"what would help: {'; '.join(remedies(alive, kinds, strategy, head))}")
    return "\n".join(lines)


def remedies(
    alive: list[Lifetime],
    kinds: Mapping[Kind, int],
    strategy: Strategy,
    head: str | None,
    rows: int | None = None,
) -> list[str]:
    """Keys of the run file, that which would help most first. `rows`: of a micro-batch, where they are known."""
    total = max(sum(kinds.values()), 1)
    working = kinds.get("activation", 0) + kinds.get("temporary", 0)
    loss = sum(
        x.bytes
        for x in alive
        if (x.phase == "loss" or x.module == head) and x.kind in ("activation", "temporary")
    )
    state = total - working - kinds.get("input", 0)
    found: list[str] = []
    if loss > _LOGITS * total:
        found.append("train.loss.chunk, smaller: the logits of fewer positions exist at the same time")
    if working >= state or loss > _LOGITS * total:
        if strategy.memory.recompute != "layer":
            found.append("strategy.memory.recompute=layer: activations are computed again, not kept")
        elif strategy.memory.recompute_layers is not None:
            found.append("strategy.memory.recompute_layers, larger or left out: more layers are recomputed")
        if rows != 1:
            found.append("train.micro_batch, smaller: a worker computes fewer rows at once")
        found.append("strategy.axes.tensor or strategy.axes.context, larger: activations are split")
    if working < state:
        if strategy.memory.shard != "parameters" and strategy.axes.degree("shard") > 1:
            found.append("strategy.memory.shard=parameters: nothing is kept whole")
        found.append("strategy.axes.shard, larger: parameters, gradients and optimizer state are split")
        if strategy.precision.param == "float32":
            found.append("strategy.precision.param=bfloat16: half the bytes")
    return found


def _line(life: Lifetime) -> str:
    what = f"{life.kind} {life.name.removeprefix(f'{life.kind}.')}" if life.name else life.kind
    return f"  {format_bytes(life.bytes):>10}  {what}{_where(life.module, life.phase)}"


def _where(module: Any, phase: str) -> str:
    if not phase:
        return ""
    return f" of {module} ({phase})" if module else f" ({phase})"
