"""The tasks of a pipeline stage as ops of a Trace, operator by operator, for `program.expand`.

The ops are those of the stage's lowered graph, up to the host points ``forward`` and ``input`` and behind them. What
`StageRunner` does besides is written out too: it copies what it was sent and goes on to write to. Of each output the
first micro-batch leaves its value, or a copy of it where other values share its memory, and every later one adds to
that as soon as it is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import fx

from hyper_parallel.graph import StepGraph, balanced_sizes
from hyper_parallel.graph.dynamic_sizes import known
from hyper_parallel.graph.execute import ready_outputs
from hyper_parallel.graph.gradients import GRADIENT
from hyper_parallel.graph.ir import Value, values_of
from hyper_parallel.graph.lower import lowered
from hyper_parallel.graph.stage_graph import Stage
from hyper_parallel.graph.step_context import current_step, region_of
from hyper_parallel.program import StageOps, TaskOps
from hyper_parallel.program.step_trace import PortMemory
from hyper_parallel.runtime.stage_costs import parts_of, port_memory
from hyper_parallel.runtime.stage_runner import changed_ports, own_outputs
from hyper_parallel.trace import Bytes, Op
from hyper_parallel.workload.work import Work


def stage_ops(
    stage: Stage, *, views: bool = False, fused: bool = False
) -> tuple[StageOps, tuple[Bytes, ...]]:
    """A stage's tasks, and what they need from outside besides ports: state and the inputs of a micro-batch. `views`,
    `fused`: as of `graph.lower.lowered`."""
    step = stage.step
    found = lowered(step, sizes=balanced_sizes(step), views=views, fused=fused)
    ports = port_memory(stage)
    taken = {ports[one.name].storage for one in (*stage.receives, *stage.gradients_in)}
    drafts = _Drafts(stage, found.ops, found.nodes, taken)
    drafts.free_ports(ports)
    drafts.add_outputs()

    def task(part: int, takes: Mapping[str, int], gives: Mapping[str, int]) -> TaskOps:
        return TaskOps(drafts.ops(part), takes, gives, drafts.first, drafts.later)

    changed = changed_ports(stage)
    sends, gradients_out = (
        {one.name: ports[one.name].storage for one in crossings}
        for crossings in (stage.sends, stage.gradients_out)
    )
    receives, gradients_in = (
        {
            one.name: drafts.copied(part, ports[one.name]) if one.name in changed else ports[one.name].storage
            for one in crossings
        }
        for part, crossings in enumerate((stage.receives, stage.gradients_in))
    )
    tasks = task(0, receives, sends), task(1, gradients_in, gradients_out), task(2, {}, {})
    resident = tuple(held for held in found.resident if held.storage not in taken)
    apart = frozenset(name for name in drafts.totals if not name.startswith(GRADIENT))
    return StageOps(*tasks, drafts.totals, drafts.sums, apart), resident


@dataclass
class _Draft:
    """An op, and what follows it before the next one."""

    op: Op
    part: int
    """The task: 0 forward, 1 INPUT, 2 WEIGHT."""
    frees: list[int]
    behind: list[Op] = field(default_factory=list)


class _Drafts:
    """The ops of a stage's graph as they are changed."""

    def __init__(
        self, stage: Stage, ops: tuple[Op, ...], nodes: tuple[fx.Node, ...], taken: set[int]
    ) -> None:
        self._stage = stage
        parts = parts_of(stage)
        self._part_of = {node: part for part, own in enumerate(parts) for node in own}
        self._place = {node: at for at, node in enumerate(stage.step.nodes)}
        self._places = [self._place[node] for node in nodes]
        self._drafts = [
            _Draft(
                replace(op, allocates=tuple(held for held in op.allocates if held.storage not in taken)),
                self._part_of[node],
                [storage for storage in op.frees if storage not in taken],
            )
            for op, node in zip(ops, nodes, strict=True)
        ]
        self._next = 1 + max(
            (*range(len(stage.step.storages)), *(held.storage for op in ops for held in op.allocates)),
            default=0,
        )
        self._begins: list[list[Op]] = [[], [], []]
        """Ops before those of the graph, by task."""
        self._ends: list[Op] = []
        """Ops behind all others."""
        self.first: dict[int, str] = {}
        self.later: dict[int, str] = {}
        self.totals: dict[str, int] = {}
        self.sums: dict[str, Op] = {}

    def ops(self, part: int) -> tuple[Op, ...]:
        """The ops of a task."""
        return (
            *self._begins[part],
            *(
                op
                for draft in self._drafts
                if draft.part == part
                for op in (replace(draft.op, frees=tuple(draft.frees)), *draft.behind)
            ),
            *(self._ends if part == 2 else ()),
        )

    def _at(self, place: int) -> _Draft:
        """The last op up to a node, in the task of that node where it has any."""
        at = max((at for at, own in enumerate(self._places) if own <= place), default=0)
        return self._drafts[at]

    def copied(self, part: int, port: PortMemory) -> int:
        """Have a task begin with a copy of what it was sent; the storage of that."""
        sent = self._number()
        work = Work("copy", read=port.bytes, written=port.bytes, op="aten.clone.default")
        memory = Bytes(port.storage, port.bytes, "temporary" if part else "activation")
        phase = "backward" if part else "forward"
        copy = Op(self._number(), "copy", phase=phase, work=work, allocates=(memory,), frees=(sent,))
        self._begins[part].append(copy)
        return sent

    def free_ports(self, ports: Mapping[str, PortMemory]) -> None:
        """Free what was received where the stage uses it last."""
        for one in (*self._stage.receives, *self._stage.gradients_in):
            port = ports[one.name]
            self._at(port.place).frees.append(port.storage)

    def add_outputs(self) -> None:
        """Add each output to that of the micro-batches before."""
        step = self._stage.step
        own, ready = own_outputs(self._stage), ready_outputs(step, GRADIENT)
        place_of = {name: self._place[node] for node, outputs in ready.items() for name, _ in outputs}
        end = len(self._place)
        order = sorted(step.returned, key=lambda name: place_of.get(name, end))
        left = Counter(step.returned[name].meta["value"].storage for name in order)
        for name in order:
            node = step.returned[name]
            (value,) = values_of(node)
            left[value.storage] -= 1
            done = not left[value.storage] and value.storage not in step.outside
            behind = self._at(place_of[name]).behind if name in place_of else self._ends
            self._add(name, node, value, name in own, done, behind)

    def _add(self, name: str, node: fx.Node, value: Value, own: bool, done: bool, behind: list[Op]) -> None:
        step = self._stage.step
        frees = (value.storage,) if done else ()
        size = known(value.bytes, balanced_sizes(step))
        if own:
            self.totals[name] = value.storage
        else:
            total = Bytes(self._number(), size, "gradient")
            work = Work("copy", read=size, written=size, dtype=_dtype(value), op="aten.clone.default")
            copy = self._op(node, "copy", work)
            behind.append(replace(copy, allocates=(total,), frees=frees))
            self.first[copy.index] = name
            self.totals[name] = total.storage
        add = self._op(node, "add", adding(step, value))
        behind.append(replace(add, frees=frees))
        self.later[add.index] = name
        both = self._op(node, "add", adding(step, value, apart=True))
        self.sums[name] = replace(both, allocates=(Bytes(self._number(), size, "gradient"),))

    def _op(self, node: fx.Node, name: str, work: Work) -> Op:
        return Op(self._number(), name, node.meta["module"], region_of(node).phase, work=work)

    def _number(self) -> int:
        """A number that no op and no storage of the stage has."""
        self._next = max(self._next, len(self._drafts)) + 1
        return self._next


def adding(step: StepGraph, value: Value, *, apart: bool = False) -> Work:
    """The sum of a micro-batch's output into that of the micro-batches before; products that add to what is there have
    read it already. `apart`: the sum of two stages' outputs, in memory of its own."""
    size = known(value.bytes, balanced_sizes(step))
    gradient = 0 if current_step().sums_in_products and not apart else 1
    return Work(
        "elementwise",
        vector_flops=size / value.dtype.itemsize,
        read=(1 + gradient) * size,
        written=size,
        dtype=_dtype(value),
        op="aten.add.Tensor" if apart else "aten.add_.Tensor",
    )


def _dtype(value: Value) -> str:
    return str(value.dtype).removeprefix("torch.")
