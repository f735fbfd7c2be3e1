"""Repeating a block of ops: what copies free and wait for, forward and backward, and what is refused."""

from __future__ import annotations

import pytest

from hyper_parallel.estimate.repeat_ops import Loop, Tag, Unlike, repeat
from hyper_parallel.trace import Bytes, Collective, Op, Trace


class _Writer:
    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.tags: list[Tag] = []

    def add(
        self,
        name: str,
        tag: Tag,
        phase: str,
        makes: int | None = None,
        frees: tuple[int, ...] = (),
        after: tuple[int, ...] = (),
    ) -> int:
        held = () if makes is None else (Bytes(makes, 8, "activation"),)
        self.ops.append(Op(len(self.ops), name, phase=phase, allocates=held, frees=frees, after=after))
        self.tags.append(tag)
        return len(self.ops) - 1

    def call(self, tag: Tag, phase: str) -> int:
        last = len(self.ops) - 1
        call = Collective("all_reduce", (0,), 8, "shard", "shard")
        self.ops.append(
            Op(last + 1, "all_reduce", phase=phase, queue="comm:shard", collective=call, after=(last,))
        )
        self.tags.append(tag)
        return last + 1


def _network(layers: int) -> _Writer:
    """Each layer makes a residual (i) that the layer behind it frees, and keeps an activation (100 + i) that its own
    backward pass frees; its gradient (200 + i) is freed by the layer before it."""
    write = _Writer()
    write.add("embed", None, "forward", makes=0)
    for i in range(layers):
        write.add("layer", i, "forward", makes=i + 1, frees=(i,))
        sent = write.call(i, "forward")
        write.add("wait", i, "forward", makes=100 + i, after=(sent,))
    write.add("loss", None, "loss", makes=200 + layers, frees=(layers,))
    for i in reversed(range(layers)):
        write.add("layer", i, "backward", makes=200 + i, frees=(201 + i, 100 + i))
    write.add("end", None, "backward", frees=(200,))
    return write


@pytest.mark.parametrize("times", [1, 2, 6])
def test_layers_repeated_are_layers_written_out(times: int) -> None:
    small, large = _network(5), _network(4 + times)
    made = repeat(small.ops, small.tags, [], Loop(2, times))
    assert [(op.name, op.phase, op.after) for op in made.ops] == [
        (op.name, op.phase, op.after) for op in large.ops
    ]
    Trace({"all": made.ops}, {0: "all"}).check()
    # Whoever frees a storage, and who made it, are the same ops in both.
    assert _frees(made.ops) == _frees(large.ops)


def _frees(ops: tuple[Op, ...] | list[Op]) -> list[tuple[int, int]]:
    made = {held.storage: op.index for op in ops for held in op.allocates}
    return sorted((made[storage], op.index) for op in ops for storage in op.frees)


def test_what_outside_frees_is_freed_of_every_copy() -> None:
    write = _Writer()
    for i in range(5):
        write.add("norm", i, "clip", makes=i)
    write.add("stack", None, "clip", frees=(0, 1, 2, 3, 4))
    made = repeat(write.ops, write.tags, [(Bytes(9, 4, "parameter", name="w"), 2)], Loop(2, 4))
    assert len(made.ops[-1].frees) == 8
    assert len({one.storage for one in made.resident}) == 4
    Trace({"all": made.ops}, {0: "all"}, {"all": made.resident}).check()


def test_blocks_that_are_not_alike_are_refused() -> None:
    write = _network(5)
    write.ops[4] = Op(4, "other", phase="forward", allocates=write.ops[4].allocates, frees=write.ops[4].frees)
    with pytest.raises(Unlike, match="not like"):
        repeat(write.ops, write.tags, [], Loop(2, 3))
    interrupted = _network(5)
    interrupted.tags[8] = None
    with pytest.raises(Unlike):
        repeat(interrupted.ops, interrupted.tags, [], Loop(2, 3))
    with pytest.raises(Unlike, match="no op belongs to block 2"):
        repeat(interrupted.ops, [None] * len(interrupted.ops), [], Loop(2, 3))
