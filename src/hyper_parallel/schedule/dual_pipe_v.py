"""DualPipeV: DualPipe cut in half, two stages on each rank in the shape of a V.

DeepSeek-AI, *DeepSeek-V3 Technical Report*, arXiv 2412.19437, section 3.2.1, gives DualPipe: micro-batches enter from
both ends, and a forward pass is paired with a backward pass of the other direction, whose communication it hides. Cut
in half and folded, rank r of P has stages r and 2 P − 1 − r, and one direction is left. A rank's order has these
phases (stage 0 is its first, 1 its second; forward passes in pairs with backward passes from the fourth on):

1. 2 (P − r − 1) forward passes of stage 0
2. r + 1 forward passes of both stages in turn
3. P − r − 1 times: a split backward and a forward pass of stage 1
4. the steady state: forward of 0 with backward of 1, forward of 1 with backward of 0
5. P − r − 1 times: backward of 1, forward of 1 with backward of 0
6. r + 1 backward passes of both stages, the later half of them split
7. P − r − 1 times: a weight half that was put off, a split backward pass of stage 0
8. r + 1 weight halves
"""

from __future__ import annotations

from collections import deque

from hyper_parallel.program import TaskKind
from hyper_parallel.schedule.schedule import Action, Schedule
from hyper_parallel.schedule.sizes import at_least


def dual_pipe_v(ranks: int, micro_batches: int) -> Schedule:
    """Two stages on each rank. Raises StrategyError for fewer than 2 P micro-batches."""
    at_least("dualpipev", ranks, micro_batches, 2 * ranks)
    orders = tuple(_Order(ranks, rank, micro_batches).actions() for rank in range(ranks))
    placement = (*range(ranks), *reversed(range(ranks)))
    return Schedule("dualpipev", placement, orders, micro_batches)


class _Order:
    """Writes the order of one rank."""

    def __init__(self, ranks: int, rank: int, micro_batches: int) -> None:
        self._ranks, self._rank, self._micro_batches = ranks, rank, micro_batches
        self._stages = (rank, 2 * ranks - 1 - rank)
        self._forward, self._backward = [0, 0], [0, 0]
        self._put_off: deque[Action] = deque()
        self._order: list[Action] = []

    def _f(self, part: int) -> None:
        self._order.append(Action(TaskKind.FORWARD, self._stages[part], self._forward[part]))
        self._forward[part] += 1

    def _b(self, part: int, *, split: bool = False) -> None:
        stage, m = self._stages[part], self._backward[part]
        self._backward[part] += 1
        self._order.append(Action(TaskKind.INPUT if split else TaskKind.BACKWARD, stage, m))
        if split:
            self._put_off.append(Action(TaskKind.WEIGHT, stage, m))

    def _w(self) -> None:
        self._order.append(self._put_off.popleft())

    def actions(self) -> tuple[Action, ...]:
        below, above = self._ranks - self._rank - 1, self._rank + 1
        for _ in range(2 * below):
            self._f(0)
        for _ in range(above):
            self._f(0)
            self._f(1)
        for _ in range(below):
            self._b(1, split=True)
            self._w()
            self._f(1)
        for _ in range(self._micro_batches - 2 * self._ranks + above):
            self._f(0)
            self._b(1)
            self._f(1)
            self._b(0)
        for _ in range(below):
            self._b(1)
            self._f(1)
            self._b(0)
        for i in range(above):
            self._b(1, split=2 * i >= above)
            self._b(0, split=2 * i + 1 >= above)
        for _ in range(below):
            self._w()
            self._b(0, split=True)
        for _ in range(above):
            self._w()
        return tuple(self._order)
