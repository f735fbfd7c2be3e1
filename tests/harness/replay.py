"""Captured graphs of all ranks run side by side in one process: nodes by their kernels, collectives by definition.

Ranks run as far as they can; a collective goes on when every rank of its group has come to it. Ranks that wait for
each other, or that come to other collectives than their peers, are an error.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from hyper_parallel.compat.dispatch import below_autograd
from hyper_parallel.graph import StepGraph, group_of, is_collective, is_wait, values_of
from hyper_parallel.graph.host_nodes import HOST

Values = dict[fx.Node, Any]
Host = Callable[[int, str, list[Tensor], Values], Tensor | None]
"""(rank, point, what it is shown, everything computed so far) to the answer."""


@dataclass
class _Call:
    """A rank at a node that it cannot run by itself."""

    node: fx.Node
    arguments: dict[str, Any]
    values: Values


def replay(steps: Mapping[int, StepGraph], tensors: Mapping[int, Mapping[str, Tensor]], host: Host) -> None:
    """Run every rank's step on its tensors, which are updated in place."""
    runs = {rank: _run(step, tensors[rank]) for rank, step in steps.items()}
    with below_autograd():
        waiting = {rank: call for rank, run in runs.items() if (call := next(run, None)) is not None}
        while waiting:
            answers = _answers(steps, waiting, host)
            assert answers, (
                f"ranks wait for each other: { {r: c.node.format_node() for r, c in waiting.items()} }"
            )
            for rank, answer in answers.items():
                try:
                    waiting[rank] = runs[rank].send(answer)
                except StopIteration:
                    del waiting[rank]


def gradients(step: StepGraph, values: Values, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """The gradients by the names of their parameters, of the `shapes` given, once everything in `values` has run."""
    found: dict[str, Tensor] = {}
    for node, value in values.items():
        for described in values_of(node):
            name = step.gradients.get(described.storage)
            if name is not None and isinstance(value, Tensor) and value.shape == shapes[name]:
                found[name] = value
    return found


def _run(step: StepGraph, tensors: Mapping[str, Tensor]) -> Generator[_Call, Any, None]:
    values: Values = {}
    given = iter(step.inputs)
    for node in step.graph.nodes:
        if node.op == "placeholder":
            values[node] = tensors[next(given).name]
        elif node.op == "get_attr":
            values[node] = step.constants[node.target]
        elif node.op == "call_function":
            args = fx.map_arg(node.args, lambda n: values[n])
            kwargs = fx.map_arg(node.kwargs, lambda n: values[n])
            if node.target is HOST or is_collective(node):
                names = [argument.name for argument in node.target._schema.arguments]
                values[node] = yield _Call(node, {**dict(zip(names, args, strict=False)), **kwargs}, values)
            else:
                values[node] = args[0] if is_wait(node) else node.target(*args, **kwargs)


def _answers(steps: Mapping[int, StepGraph], waiting: Mapping[int, _Call], host: Host) -> dict[int, Any]:
    answers: dict[int, Any] = {}
    for rank, call in waiting.items():
        if rank in answers:
            continue
        if call.node.target is HOST:
            answers[rank] = host(rank, call.arguments["point"], call.arguments["values"], call.values)
            continue
        group = group_of(steps[rank], call.node)
        assert rank in group.ranks
        peers = [waiting.get(peer) for peer in group.ranks]
        if any(peer is None or not is_collective(peer.node) for peer in peers):
            continue
        same = [group_of(steps[r], p.node) for r, p in zip(group.ranks, peers, strict=True) if p is not None]
        if any((other.axis, other.ranks) != (group.axis, group.ranks) for other in same):
            continue
        targets = {str(peer.node.target) for peer in peers if peer is not None}
        assert len(targets) == 1, f"ranks {group.ranks} come to {targets} at once"
        results = _collective(targets.pop(), [peer.arguments for peer in peers if peer is not None])
        answers.update(zip(group.ranks, results, strict=True))
    return answers


def _collective(target: str, calls: list[dict[str, Any]]) -> list[Tensor]:
    inputs, count = [call["input"] for call in calls], len(calls)
    name = target.split(".")[1]
    if name == "all_gather_into_tensor":
        return [torch.cat(inputs) for _ in calls]
    if name == "all_to_all_single":
        parts = [call["input"].split(call["input_split_sizes"]) for call in calls]
        received = [torch.cat([parts[source][place] for source in range(count)]) for place in range(count)]
        for call, got in zip(calls, received, strict=True):
            assert got.size(0) == sum(call["output_split_sizes"])
        return received
    ops = {call["reduce_op"] for call in calls}
    (op,) = ops
    reduced = {"sum": lambda x: x.sum(0), "max": lambda x: x.amax(0), "avg": lambda x: x.mean(0)}[op](
        torch.stack(inputs)
    )
    if name == "all_reduce":
        return [reduced.clone() for _ in calls]
    assert name == "reduce_scatter_tensor", target
    return [part.clone() for part in reduced.chunk(count)]
