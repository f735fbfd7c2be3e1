"""ZB-V, V-Half and V-Min: two stages on each rank in the shape of a V, stage s on rank min(s, 2 P − 1 − s).

Qi et al., *Pipeline Parallelism with Controllable Memory*, arXiv 2405.15362, and *Zero Bubble Pipeline Parallelism*,
arXiv 2401.10241, section 6. The first and the last stage of a micro-batch lie on rank 0, so that what is held long in
one stage of a rank is held briefly in the other, and all ranks hold as much.

V-Half and V-Min repeat a building block: the four passes of one micro-batch descend or ascend the ranks with fixed
offsets δ between neighbours, and the next micro-batch follows after T = 6 units (F = I = W = 1). A micro-batch's
lifespan divided by T is what a rank holds, so the sum of the offsets sets the memory: 4 for V-Min (a third of 1F1B's),
6 for V-Half. Offsets and gaps must be such that on no rank two passes fall on one unit (mod T); weight halves take the
two units that are left. Written in the order of these times, the ranks close up by themselves.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hyper_parallel.program.build import Action, Schedule
from hyper_parallel.program.program import TaskKind
from hyper_parallel.schedule.one_f_one_b import at_least

_PERIOD = 6
"""Units in which a rank runs the six actions of one micro-batch."""


def v_placement(ranks: int) -> tuple[int, ...]:
    """Stage to rank: down, and up again."""
    return (*range(ranks), *reversed(range(ranks)))


def v_min(ranks: int, micro_batches: int) -> Schedule:
    """Holds ⌊(P + 4) / 3⌋ micro-batches. Raises StrategyError for bad sizes."""
    # A multiple of 3 makes passes collide; two units of waiting at the top of the V mend that.
    gaps = (0, 0 if ranks % 3 else 2, 0)
    return _repeated("v-min", ranks, micro_batches, _Block((1, 1, 1, 1), gaps))


def v_half(ranks: int, micro_batches: int) -> Schedule:
    """Holds ⌊(P + 2) / 2⌋ micro-batches. Raises StrategyError for bad sizes."""
    gaps = (1, 0, 0) if ranks % 2 else (3, 0, 4)
    return _repeated("v-half", ranks, micro_batches, _Block((1, 2, 1, 2), gaps))


@dataclass(frozen=True)
class _Block:
    """When one micro-batch's passes run: forward passes of both stages, then INPUT halves of the second and first."""

    offsets: tuple[int, int, int, int]
    """Units between neighbouring ranks, of each pass."""
    gaps: tuple[int, int, int]
    """Units of waiting between one pass and the next on the rank where the V turns."""

    def times(self, ranks: int, rank: int) -> tuple[int, int, int, int, int, int]:
        """Units of the four passes on a rank, and of the WEIGHT halves of the second and the first stage."""
        below = ranks - 1 - rank
        begun = 0
        passes = []
        for index, offset in enumerate(self.offsets):
            passes.append(begun + offset * (below if index % 2 else rank))
            if index < 3:
                begun += offset * (ranks - 1) + 1 + self.gaps[index]
        first, second = sorted(set(range(_PERIOD)) - {unit % _PERIOD for unit in passes})
        ways = [
            (_next(passes[2], one), _next(passes[3], other))
            for one, other in ((first, second), (second, first))
        ]
        return (*passes, *min(ways, key=sum))  # type: ignore[return-value]


def _next(after: int, unit: int) -> int:
    """The first time after `after` that falls on `unit` of the period."""
    return after + 1 + (unit - after - 1) % _PERIOD


def _repeated(name: str, ranks: int, micro_batches: int, block: _Block) -> Schedule:
    at_least(name, ranks, micro_batches)
    orders = []
    for rank in range(ranks):
        first, second = rank, 2 * ranks - 1 - rank
        what = (
            (TaskKind.FORWARD, first),
            (TaskKind.FORWARD, second),
            (TaskKind.INPUT, second),
            (TaskKind.INPUT, first),
            (TaskKind.WEIGHT, second),
            (TaskKind.WEIGHT, first),
        )
        timed = [
            (time + _PERIOD * m, Action(kind, stage, m))
            for time, (kind, stage) in zip(block.times(ranks, rank), what, strict=True)
            for m in range(micro_batches)
        ]
        orders.append(tuple(action for _, action in sorted(timed, key=lambda pair: pair[0])))
    return Schedule(name, v_placement(ranks), tuple(orders), micro_batches)


def zb_v(ranks: int, micro_batches: int) -> Schedule:
    """No bubble with F = I = W, memory of 1F1B's first rank. Raises StrategyError for fewer than 2 P − 1 micro-batches.

    Rank r fills the time until the first activation comes back up with 2 (P − r) − 1 forward passes, the time until
    the first gradient comes down with r pairs of them, and the time until it comes back up with P − r backward passes
    of its second stage. Then its six actions repeat, and the drain is the fill backwards.
    """
    at_least("zb-v", ranks, micro_batches, 2 * ranks - 1)
    return Schedule(
        "zb-v",
        v_placement(ranks),
        tuple(_zb_v_order(ranks, rank, micro_batches) for rank in range(ranks)),
        micro_batches,
    )


def _zb_v_order(ranks: int, rank: int, micro_batches: int) -> tuple[Action, ...]:
    stages = (rank, 2 * ranks - 1 - rank)
    forward, backward = [0, 0], [0, 0]
    order: list[Action] = []
    put_off: deque[Action] = deque()

    def f(part: int) -> None:
        if forward[part] < micro_batches:
            order.append(Action(TaskKind.FORWARD, stages[part], forward[part]))
            forward[part] += 1

    def i(part: int) -> None:
        order.append(Action(TaskKind.INPUT, stages[part], backward[part]))
        put_off.append(Action(TaskKind.WEIGHT, stages[part], backward[part]))
        backward[part] += 1

    for _ in range(2 * (ranks - rank) - 1):
        f(0)
    for _ in range(rank):
        f(1)
        f(0)
    for _ in range(ranks - rank):
        f(1)
        i(1)
        order.append(put_off.popleft())
    while forward[1] < micro_batches:
        f(0)
        i(0)
        order.append(put_off.popleft())
        f(1)
        i(1)
        order.append(put_off.popleft())
    for _ in range(rank):
        i(0)
        i(1)
    for _ in range(ranks - rank):
        i(0)
        order.append(put_off.popleft())
    order.extend(put_off)
    return tuple(order)


# DualPipeV: DualPipe cut in half, two stages on each rank in the shape of a V.
#
# DeepSeek-AI, *DeepSeek-V3 Technical Report*, arXiv 2412.19437, section 3.2.1, gives DualPipe: micro-batches enter from
# both ends, and a forward pass is paired with a backward pass of the other direction, whose communication it hides. Cut
# in half and folded, rank r of P has stages r and 2 P − 1 − r, and one direction is left. A rank's order has these
# phases (stage 0 is its first, 1 its second; forward passes in pairs with backward passes from the fourth on):
#
# 1. 2 (P − r − 1) forward passes of stage 0
# 2. r + 1 forward passes of both stages in turn
# 3. P − r − 1 times: a split backward and a forward pass of stage 1
# 4. the steady state: forward of 0 with backward of 1, forward of 1 with backward of 0
# 5. P − r − 1 times: backward of 1, forward of 1 with backward of 0
# 6. r + 1 backward passes of both stages, the later half of them split
# 7. P − r − 1 times: a weight half that was put off, a split backward pass of stage 0
# 8. r + 1 weight halves


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
