"""Random costs, and what every schedule must have."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import strategies as st

from hyper_parallel.program import TaskKind
from hyper_parallel.schedule import Costs, Schedule


def assert_complete(schedule: Schedule) -> None:
    """Each stage has a forward pass and a whole or a split backward pass of each micro-batch, on its own rank."""
    for rank, order in enumerate(schedule.orders):
        for action in order:
            assert schedule.placement[action.stage] == rank
    counts = Counter(action for order in schedule.orders for action in order)
    assert set(counts.values()) == {1}
    kinds: dict[tuple[int, int], set[TaskKind]] = {}
    for action in counts:
        kinds.setdefault((action.stage, action.micro_batch), set()).add(action.kind)
    assert set(kinds) == {(s, m) for s in range(schedule.stages) for m in range(schedule.micro_batches)}
    whole = {TaskKind.FORWARD, TaskKind.BACKWARD}
    split = {TaskKind.FORWARD, TaskKind.INPUT, TaskKind.WEIGHT}
    assert all(found in (whole, split) for found in kinds.values())


@st.composite
def uneven(draw: st.DrawFn, stages: int) -> Costs:
    """Costs in quarters of a second, so that sums are exact; transfers shorter than any pass."""

    def times(count: int, least: int, most: int) -> tuple[float, ...]:
        return tuple(draw(st.integers(least, most)) / 4 for _ in range(count))

    forward, input, weight = (times(stages, 4, 12) for _ in range(3))
    whole = tuple(i + w for i, w in zip(input, weight, strict=True))
    transfers = times(stages - 1, 0, 4)
    return Costs(forward=forward, backward=whole, input=input, weight=weight, transfers=transfers)


def recomputed(costs: Costs) -> Costs:
    """With layer recomputation: a backward pass runs the forward pass again, and both halves of a split one do."""

    def added(times: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(a + b for a, b in zip(times, costs.forward, strict=True))

    return replace(
        costs, backward=added(costs.backward), input=added(costs.input), weight=added(costs.weight)
    )
