"""Runs the tasks of one pipeline stage: a generator of the stage's graph for each micro-batch in flight.

Between two tasks of a micro-batch the generator holds what the forward pass has saved, and frees it as the backward
pass uses it. Two tasks run as a pair by taking turns: a generator stops before each wait for a collective, and the
other one goes on. Gradients of weights are added up in the order in which micro-batches arrive here, each as soon as it
is computed, so that those of a whole stage are in memory once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from hyper_parallel.compat.dispatch import below_autograd
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.graph import executable
from hyper_parallel.graph.gradients import GRADIENT
from hyper_parallel.graph.graph_writer import span
from hyper_parallel.graph.host_nodes import HOST, HostPoint
from hyper_parallel.graph.ir import is_wait, values_of
from hyper_parallel.graph.memory_effects import writes
from hyper_parallel.graph.partition import Crossing
from hyper_parallel.graph.stage_graph import Stage
from hyper_parallel.program.instruction_loop import TaskRunner, Turns

_Pass = Generator[Any, Any, tuple[Tensor, ...]]


class StageRunner(TaskRunner[Tensor]):
    """The tasks of one stage of one step after the other."""

    def __init__(self, stage: Stage, state: Mapping[str, Tensor], *, pauses: bool = False) -> None:
        """`state`: parameters and buffers by the names of the graph's inputs. `pauses`: tasks run in pairs too."""
        self.stage = stage
        waits = [node for node in stage.step.nodes if pauses and is_wait(node)]
        self._run = executable(stage.step, deliver=(GRADIENT, self._add), pauses=waits)
        self._state = state
        self._weights: Mapping[str, Tensor] = {}
        self._kept = own_outputs(stage)
        """Outputs whose tensors can be added to."""
        self._changed = changed_ports(stage)
        """Ports whose values the stage writes to; from a stage of the same rank they are that stage's own memory."""
        self._in_flight: dict[int, _Pass] = {}
        self.gradients: dict[str, Tensor] = {}
        """By the names of their parameters, summed over the micro-batches so far."""
        self.totals: dict[str, Tensor] = {}
        """Outputs that are no gradients, the loss for one, summed likewise."""

    @property
    def in_flight(self) -> int:
        """Micro-batches whose forward pass has run and whose backward pass has not ended."""
        return len(self._in_flight)

    def forward_in_turns(
        self, micro_batch: int, batch: Mapping[str, Tensor], received: Mapping[str, Tensor]
    ) -> Turns[Tensor]:
        """As of `TaskRunner`, with flat values."""
        if micro_batch in self._in_flight:
            raise HyperParallelError(f"{self._at(micro_batch)}: its forward pass has run already")
        given = {one.name: shaped(self._own(received, one.name), one) for one in self.stage.receives}
        known = {**self._state, **self._weights, **batch, **given}
        running = self._run.function([known[name] for name in self._run.inputs])
        self._in_flight[micro_batch] = running
        del known, given
        shown = yield from self._until(running, None, HostPoint.FORWARD, (), micro_batch)
        return {one.name: flat(value, one) for one, value in zip(self.stage.sends, shown, strict=False)}

    def input_in_turns(self, micro_batch: int, received: Mapping[str, Tensor]) -> Turns[Tensor]:
        """As of `TaskRunner`, with flat values."""
        running = self._running(micro_batch)
        given = [self._own(received, one.name) for one in self.stage.gradients_in]
        shown = yield from self._until(running, _NOTHING, HostPoint.INPUT, given, micro_batch)
        return {
            one.name: flat(value, one) for one, value in zip(self.stage.gradients_out, shown, strict=False)
        }

    def weight_in_turns(self, micro_batch: int) -> Turns[Tensor]:
        """As of `TaskRunner`."""
        running = self._running(micro_batch)
        returned: dict[str, Tensor] | None = None
        while returned is None:
            try:
                with below_autograd():
                    point, _ = running.send(_NOTHING)
            except StopIteration as stop:
                returned = dict(zip(self._run.outputs, stop.value, strict=True))
            else:
                if point != HostPoint.PAUSE:
                    raise HyperParallelError(
                        f"{self._at(micro_batch)}: asks for {point!r} where its backward pass ends"
                    )
                yield
        del self._in_flight[micro_batch]
        with torch.no_grad():
            for name, value in returned.items():
                self._add(name, value)
        return {}

    def _add(self, name: str, value: Tensor) -> None:
        """Add an output of a micro-batch; of the first one it is kept as it is where nothing else has its memory."""
        into = self.gradients if name.startswith(GRADIENT) else self.totals
        key = name.removeprefix(GRADIENT)
        if key in into:
            into[key].add_(value)
        else:
            into[key] = value if name in self._kept else value.clone()

    def begin(self, weights: Mapping[str, Tensor], gradients: dict[str, Tensor] | None = None) -> None:
        """Begin a new step, in which the graph is given these weights too; micro-batches of one that failed are
        dropped. `gradients`: to which this stage adds its own; a new dict when left out."""
        self._in_flight.clear()
        self._weights = weights
        self.gradients, self.totals = {} if gradients is None else gradients, {}

    def node_of(self, error: BaseException) -> fx.Node | None:
        """The node of the stage in which an error arose; None where it came from elsewhere."""
        return self._run.node_of(error)

    def _own(self, received: Mapping[str, Tensor], name: str) -> Tensor:
        return received[name].clone() if name in self._changed else received[name]

    def _running(self, micro_batch: int) -> _Pass:
        if micro_batch not in self._in_flight:
            raise HyperParallelError(
                f"{self._at(micro_batch)}: its forward pass has not run, or its backward pass has"
            )
        return self._in_flight[micro_batch]

    def _until(
        self, running: _Pass, answer: Any, point: HostPoint, received: Iterable[Tensor], micro_batch: int
    ) -> Generator[None, None, Any]:
        """Run to a suspension point, and answer what is asked for on the way; what is shown there. Stops at pauses."""
        left = iter(received)
        while True:
            with below_autograd():
                reached, shown = running.send(answer)
            if reached == point:
                return shown
            if reached == HostPoint.PAUSE:
                yield
                answer = _NOTHING
                continue
            if reached != HostPoint.RECEIVE:
                raise HyperParallelError(
                    f"{self._at(micro_batch)}: stopped at {reached!r} on the way to {point!r}"
                )
            answer = next(left)

    def _at(self, micro_batch: int) -> str:
        return f"stage {self.stage.number}, micro-batch {micro_batch}"


_NOTHING = torch.empty(0)


def own_outputs(stage: Stage) -> frozenset[str]:
    """Outputs that fill memory which nothing else uses: no input, no second output, no part of a larger tensor."""
    step = stage.step
    values = {name: node.meta["value"] for name, node in step.returned.items()}
    uses = Counter(value.storage for value in values.values())
    return frozenset(
        name
        for name, value in values.items()
        if uses[value.storage] == 1
        and value.storage not in step.outside
        and value.bytes == step.storages[value.storage].bytes
    )


def changed_ports(stage: Stage) -> frozenset[str]:
    """Ports whose values a stage writes to."""
    written = {storage for node in stage.step.nodes for storage in writes(node)}
    answers = (node for node in stage.step.nodes if node.target is HOST and node.args[0] == HostPoint.RECEIVE)
    storages = {
        value.storage: one.name
        for one, node in zip(stage.gradients_in, answers, strict=True)
        for value in values_of(node)
    }
    storages |= {storage: entry.name for storage, entry in stage.step.outside.items()}
    return frozenset(name for storage, name in storages.items() if storage in written)


def flat(value: Tensor, port: Crossing) -> Tensor:
    """The elements of a value in the order of its memory, [span]: a view, or a copy where a kernel has given other
    strides than were captured. Raises HyperParallelError if the shape is another one."""
    captured = port.value
    if tuple(value.shape) != captured.shape:
        raise HyperParallelError(
            f"port {port.name}: {tuple(value.shape)} is to be sent, and {captured.shape} was captured"
        )
    strides = zip(captured.shape, value.stride(), captured.stride, strict=True)
    # The stride of a dimension with one element addresses nothing.
    if any(given != expected for size, given, expected in strides if size > 1):
        value = torch.empty_strided(
            captured.shape, captured.stride, dtype=value.dtype, device=value.device
        ).copy_(value)
    return torch.as_strided(value, (span(captured),), (1,), value.storage_offset())


def shaped(received: Tensor, port: Crossing) -> Tensor:
    """A value from the elements of its memory: a view."""
    return torch.as_strided(received, port.value.shape, port.value.stride)
