"""Suspension points: nodes at which the host reads values or answers.

Captured, it is a node; run from a graph, the run yields there (`execute`); run eagerly, it is an error, since there is
nobody to ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import torch

from hyper_parallel.errors import HyperParallelError

_library = torch.library.Library("hyper_parallel", "FRAGMENT")
_library.define("host(str point, Tensor[] values, int count, ScalarType dtype=float) -> Tensor")


def _nobody(
    point: str, values: Sequence[torch.Tensor], count: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    raise HyperParallelError(f"the host point {point!r} was reached outside of a captured graph")


def _fake(
    point: str, values: Sequence[torch.Tensor], count: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return values[0].new_empty(count, dtype=dtype)


_library.impl("host", _nobody, "CompositeExplicitAutograd")
_library.impl("host", _fake, "Meta")


class HostPoint(StrEnum):
    """Why a run stops and asks the host. A graph's node has the text; every host is given the member."""

    LOAD = "load"
    """The device has the backward pass to compute: the host loads the next batch and says what this rank has to say."""
    CHECK = "check"
    """The host is shown what the step came to, and may raise before anything is updated."""
    ROWS = "rows"
    """The host is shown the largest load of the experts of all ranks, and may raise before there is memory for it."""
    LOOK = "look"
    """The host is shown a tensor, and gives nothing."""
    TURN = "turn"
    """The forward pass is over: the host is shown what it gives, and answers with the gradient of the first of it."""
    GRADIENT = "gradient"
    """The host answers with the gradient of a further output."""
    END = "end"
    """The backward pass is over."""
    FORWARD = "forward"
    """A pipeline stage's forward pass is over: the host is shown what goes to later stages."""
    RECEIVE = "receive"
    """The host answers with the next value that comes back from a later stage."""
    INPUT = "input"
    """A pipeline stage's gradients of inputs are computed: the host is shown what goes back to earlier stages."""
    BEGIN = "begin"
    """An instruction of a pipeline's program begins: where a rank's whole list is one graph, the host keeps count."""
    POST = "post"
    """The host posts a receive, and answers with the memory that it will fill (`graph.transfer_nodes`)."""
    SEND = "send"
    """The host begins to send what it is shown."""
    WAIT = "wait"
    """The host waits for transfers."""
    PAUSE = "pause"
    """A collective is about to be waited for: another task may run meanwhile. It is no node of the graph; the executor
    adds it where it is given `pauses`."""


HOST = torch.ops.hyper_parallel.host.default
torch.fx.node.has_side_effect(HOST)


def host(
    point: HostPoint, values: Sequence[torch.Tensor], count: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Ask the host: it is shown `values`, at least one, and gives [count] of `dtype` on their device."""
    answer: torch.Tensor = HOST(point.value, list(values), count, dtype=dtype)
    return answer
