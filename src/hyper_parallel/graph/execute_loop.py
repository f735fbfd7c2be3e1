"""Executor of a step of several micro-batches: one Python function that loops over them.

    for first, last, (ids, labels, …) in batches:
        if first: weight = gather(…)
        …
        total = add_(total, gradient)
        if last: reduced = reduce(total)

The body is written once, however many micro-batches there are. What is computed in the first micro-batch alone is kept
until its last use in the last one; everything else is let go of in its own micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hyper_parallel.graph.accumulate import Accumulation, When, when_of
from hyper_parallel.graph.execute import Host, SourceWriter, node_at, refuse_balanced, run_with_host
from hyper_parallel.graph.ir import StepGraph, Value

Batches = Sequence[tuple[bool, bool, Sequence[torch.Tensor]]]
"""Of each micro-batch whether it is the first, the last, and its inputs."""


@dataclass(frozen=True)
class LoopExecutable:
    """A loop over micro-batches, ready to run."""

    inputs: tuple[str, ...]
    """Names of what all micro-batches are given: first what is not in `totals`, then the totals."""
    batch: tuple[str, ...]
    """Names of what each is given, as those of the first micro-batch."""
    totals: Mapping[str, Value]
    source: str
    """The Python that runs it."""
    function: Callable[[Sequence[torch.Tensor], Batches], Generator[Any, Any, tuple[torch.Tensor, ...]]]
    lines: Mapping[int, fx.Node]
    """Line of the source to the node that it runs."""

    def run(
        self,
        tensors: Mapping[str, torch.Tensor],
        micro_batches: Sequence[Mapping[str, torch.Tensor]],
        host: Host | None = None,
    ) -> None:
        """Run a step on `tensors`, by the names of `inputs`, and on `micro_batches`, by the names of `batch`; state is
        updated in place. Raises what `host` raises; nothing behind that host point has run then."""
        last = len(micro_batches) - 1
        batches = [
            (at == 0, at == last, [given[name] for name in self.batch])
            for at, given in enumerate(micro_batches)
        ]
        # Handed over without being kept here, so that the function can let go of them.
        steps = self.function(
            [_zeros(self.totals[name]) if name in self.totals else tensors[name] for name in self.inputs],
            batches,
        )
        run_with_host(steps, host)

    def node_of(self, error: BaseException) -> fx.Node | None:
        """The node in which an error of `run` arose; None where it came from elsewhere."""
        return node_at(error, self.function, self.lines)


def loop_executable(loop: Accumulation, body: StepGraph | None = None) -> LoopExecutable:
    """The Python function of a step of several micro-batches. `body`: what the loop's body was compiled to.

    Raises CaptureError as `execute.executable`.
    """
    body = loop.body if body is None else body
    refuse_balanced(body)
    writer = _LoopWriter(body, loop)
    source = writer.source()
    namespace = writer.names
    exec(compile(source, f"<loop over {len(writer.last)} nodes>", "exec"), namespace)
    names = [entry.name for entry in body.inputs]
    return LoopExecutable(
        tuple(name for name in names if name not in loop.batch),
        tuple(name for name in names if name in loop.batch),
        loop.totals,
        source,
        namespace["step"],
        writer.lines,
    )


class _LoopWriter(SourceWriter):
    """Writes the loop."""

    def __init__(self, body: StepGraph, loop: Accumulation) -> None:
        super().__init__(body, None, None, {})
        self._loop = loop

    def source(self) -> str:
        """The whole function."""
        named = list(zip(self.step.inputs, self.step.placeholders, strict=True))
        given = [self.variable(node) for entry, node in named if entry.name not in self._loop.batch]
        varying = [self.variable(node) for entry, node in named if entry.name in self._loop.batch]
        constants = [
            f"{self.variable(node)} = {node.target}"
            for node in self.step.graph.nodes
            if node.op == "get_attr"
        ]
        unpacked = f"{', '.join(given)}, = inputs" if given else "pass"
        lines = [
            "def step(inputs, batches):",
            *(f"    {line}" for line in (unpacked, "del inputs", *constants)),
            f"    for first, last, ({''.join(f'{name}, ' for name in varying)}) in batches:",
        ]
        guard: When = "each"
        for when, text, node in self._statements():
            if when != guard and when != "each":
                lines.append(f"        if {when}:")
            guard = when
            lines.append(f"{' ' * (8 if when == 'each' else 12)}{text}")
            if node is not None:
                self.lines[len(lines)] = node
        # A generator, also where no node asks the host.
        lines += ["    return ()", "    yield"]
        return "".join(f"{line}\n" for line in lines)

    def _statements(self) -> Iterator[tuple[When, str, fx.Node | None]]:
        """The loop's body: when each line runs, the line, and the node that it runs."""
        inputs = dict(zip(self.step.placeholders, self.step.inputs, strict=True))
        for node in self.step.graph.nodes:
            if node.op == "call_function":
                yield when_of(node), self.line(node), node
            dead: dict[When, list[str]] = {}
            for source in self.last.get(node, ()):
                if source.op == "call_function":
                    dead.setdefault(_let_go(source), []).append(self.variable(source))
                elif source in inputs and inputs[source].name in self._loop.totals:
                    dead.setdefault("last", []).append(self.variable(source))
            for when, names in dead.items():
                yield when, f"del {', '.join(names)}", None


def _let_go(node: fx.Node) -> When:
    """The micro-batches in which a value dies."""
    when = when_of(node)
    if when == "first" and any(when_of(user) != "first" for user in node.users):
        return "last"
    return when


def _zeros(like: Value) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=like.device).zero_()
