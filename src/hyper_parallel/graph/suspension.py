"""Suspension points: nodes at which the host reads values or answers.

Captured, it is a node; run from a graph, the run yields there (`execute`); run eagerly, it is an error, since there is
nobody to ask.
"""

from __future__ import annotations

from collections.abc import Sequence

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
HOST = torch.ops.hyper_parallel.host.default
torch.fx.node.has_side_effect(HOST)


def host(
    point: str, values: Sequence[torch.Tensor], count: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Ask the host: it is shown `values`, at least one, and gives [count] of `dtype` on their device."""
    answer: torch.Tensor = HOST(point, list(values), count, dtype=dtype)
    return answer
