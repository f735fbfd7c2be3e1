"""Post receives ahead of their use: as early as the channel's order and a bound on buffers allow."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from hyper_parallel.program.instructions import Instruction, Recv, Wait


def post_ahead(instructions: Sequence[Instruction], depth: int) -> list[Instruction]:
    """The same instructions, with each Recv as early as possible.

    Receives from one group stay in their order. A Recv moves ahead while fewer than `depth` receives of its port are
    posted and not waited for; it never moves back, so it may exceed the bound where it stood already. A Recv does not
    block: posted earlier, it lets the other group's Send return sooner and delays nothing.
    """
    fixed: list[Instruction] = []
    queues: dict[str, deque[tuple[int, Recv]]] = {}
    for one in instructions:
        if isinstance(one, Recv):
            queues.setdefault(one.source, deque()).append((len(fixed), one))
        else:
            fixed.append(one)
    moved: list[Instruction] = []
    posted: Counter[str] = Counter()
    received: set[tuple[str, int | None, str]] = set()

    def post(index: int) -> None:
        ready: list[tuple[int, Recv]] = []
        for queue in queues.values():
            while queue and (queue[0][0] <= index or posted[queue[0][1].port] < depth):
                ready.append(queue.popleft())
                posted[ready[-1][1].port] += 1
        for _, one in sorted(ready, key=lambda pair: pair[0]):
            received.add((one.port, one.micro_batch, one.source))
            moved.append(one)

    for index, one in enumerate(fixed):
        post(index)
        moved.append(one)
        if isinstance(one, Wait) and (one.port, one.micro_batch, one.peer) in received:
            posted[one.port] -= 1
    post(len(fixed))
    return moved
