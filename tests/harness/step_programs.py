"""Stages without graphs, for Programs that are built, checked or timed and compute nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyper_parallel.graph.ir import StepGraph, Value
from hyper_parallel.graph.partition import Crossing
from hyper_parallel.graph.stage_graph import Partition, Stage
from hyper_parallel.layout import DeviceGroup, Layout
from hyper_parallel.runtime.build_program import ProgramKind


def chain_kind(
    number: int, groups: Sequence[DeviceGroup], placement: Sequence[int], count: int
) -> ProgramKind:
    """`count` micro-batches of the kind `number`, with a stage on each of the placement's groups, which feeds the next
    one; values have as many elements as the number."""
    value = Value((number,), (1,), torch.float32, torch.device("cpu"), 0)
    borders = range(len(placement) - 1)
    ahead = [Crossing("x", at, at + 1, "forward", value, "x", 0, number) for at in borders]
    back = [Crossing("x", at + 1, at, "backward", value, "x", 0, number) for at in borders]
    stages = [
        Stage(
            at,
            StepGraph.__new__(StepGraph),
            _near(ahead, at - 1),
            _near(ahead, at),
            _near(back, at),
            _near(back, at - 1),
        )
        for at in range(len(placement))
    ]
    homes = [groups[place] for place in placement]
    layouts = {
        one.name: {
            homes[at].name: Layout.replicated(homes[at].mesh, (number,)) for at in (one.source, one.target)
        }
        for one in (*ahead, *back)
    }
    return ProgramKind(Partition(tuple(stages), {}), tuple(placement), layouts, count)


def _near(crossings: Sequence[Crossing], border: int) -> tuple[Crossing, ...]:
    return tuple(crossings[border : border + 1]) if border >= 0 else ()
