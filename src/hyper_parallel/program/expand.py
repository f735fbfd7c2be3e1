"""Expansion of a Program: the ops of every rank of a step, as a Trace that the simulator times.

Each device group's list is walked by the loop that runs it (`program.instruction_loop`), with storages for tensors:

    Run       the ops of its task, with indices and storages of its micro-batch
    RunPair   the ops of both tasks in turns, or one op where the seconds of the pair are known
    Recv      two ops: memory is taken where it is posted, and what comes is on the queue of its channel,
              `comm:from <group>`, behind the kernels before it
    Send      on `comm:to <group>`, likewise; both ends run at the same time, once both are reached (rendezvous)
    Wait      an op of the compute queue that takes no time, and lets go of what was sent

A storage is freed by the last of its users: the stage that computes it, the transfer under way, the stage of the same
group that takes it. A task may have all its operators (`runtime.stage_ops`), or be one op of known seconds
(`estimate.stage_price`), which is faster where there are many micro-batches.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hyper_parallel.errors import ProgramError
from hyper_parallel.layout import DeviceGroup
from hyper_parallel.program.instruction_loop import InstructionLoop, TaskRunner, Turns
from hyper_parallel.program.program import Program, Recv, Run, Send, TaskKind, Wait, runs_of
from hyper_parallel.program.transfers import Slowest, Transfer, Transfers
from hyper_parallel.program.verify import verify
from hyper_parallel.trace import Bytes, Collective, Op, Trace, is_compute
from hyper_parallel.trace.trace import PAIRED, Kind
from hyper_parallel.workload.work import Work

AXIS = "pipeline"
"""The axis of transfers between device groups."""

Hides = Callable[[int, int, TaskKind], float]
"""(stage of the forward task, stage of the backward task, the kind of that) to the seconds that the pair saves."""


@dataclass(frozen=True)
class TaskOps:
    """What one run of a task is. Ops have indices and storages that are unique in their stage; `{}` in an op's name
    stands for the micro-batch. Ranks of collectives are places in the device group."""

    ops: tuple[Op, ...] = ()
    takes: Mapping[str, int] = field(default_factory=dict)
    """Name of a value, a port's for example, to its storage. The ops free it once they need it no more."""
    gives: Mapping[str, int] = field(default_factory=dict)
    first: Mapping[int, str] = field(default_factory=dict)
    """Index of an op to the total (`StageOps.totals`) that it begins: only the first run in a step has it."""
    later: Mapping[int, str] = field(default_factory=dict)
    """Index of an op to the total that it adds to: all but the first run have it."""


@dataclass(frozen=True)
class StageOps:
    """The tasks of a stage for one micro-batch. A backward task is its INPUT task and then its WEIGHT task."""

    forward: TaskOps
    input: TaskOps
    weight: TaskOps
    totals: Mapping[str, int] = field(default_factory=dict)
    """Name to the storage that the first run leaves, for what runs behind the last micro-batch."""
    sums: Mapping[str, Op] = field(default_factory=dict)
    """Name of a total to the op that adds it to that of another stage of the same rank, in new memory."""
    apart: frozenset[str] = frozenset()
    """Totals that are this stage's alone, whatever it is `joined` with: a loss."""


@dataclass(frozen=True)
class GroupOps:
    """What the ranks of a device group hold and run besides micro-batches. Ranks of collectives are global."""

    resident: tuple[Bytes, ...] = ()
    before: tuple[TaskOps, ...] = ()
    after: tuple[TaskOps, ...] = ()
    """They take what the ones before them and the stages (`StageOps.totals`) give, by name."""


def expand(
    program: Program,
    stages: Mapping[int, StageOps],
    groups: Mapping[str, GroupOps] | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    turns: Mapping[tuple[int, int], Sequence[int]] | None = None,
    joined: Mapping[int, int] | None = None,
    hides: Hides | None = None,
    slowest: Slowest | None = None,
) -> Trace:
    """The Trace of a step: a rank class for each device group with instructions.

    `stages`: by number; `groups`: by name. `sizes`: bytes of a port's value as one rank has it in memory; the size of
    its layout where left out. `turns`: as of `runtime.interpreter.Interpreter`. `joined`: stage to the earlier one
    of its group, of another kind of micro-batches, to whose totals it adds its own. `hides`: pairs are one op each, of
    tasks with known seconds. `slowest`: the first when left out. Raises ProgramError for a Program that cannot run.
    """
    verify(program)
    transfers = Transfers(program, sizes or {}, slowest)
    ops: dict[str, tuple[Op, ...]] = {}
    resident: dict[str, tuple[Bytes, ...]] = {}
    for name in program.instructions:
        rank = _Rank(program, program.groups[name], stages, transfers, turns, joined or {}, hides)
        ops[name], resident[name] = rank.step((groups or {}).get(name, GroupOps()))
    classes = {rank: name for name in program.instructions for rank in program.groups[name].ranks}
    return Trace(ops, classes, resident, micro_batches=program.micro_batches)


@dataclass(eq=False)
class _Memory:
    """A storage of a rank, and how many still use it."""

    held: Bytes
    users: int = 1


@dataclass(eq=False)
class _Run:
    """The runs of a stage's tasks for one micro-batch, or a task of the whole step."""

    number: int = 0
    """The micro-batch."""
    ops: dict[int, int] = field(default_factory=dict)
    """Index in the task to the index of the rank."""
    memory: dict[int, _Memory] = field(default_factory=dict)
    """Storage in the task to that of the rank."""
    given: Counter[int] = field(default_factory=Counter)
    """Storage in the task to its users besides the stage, where it is not allocated yet."""
    begun: set[str] = field(default_factory=set)
    """Totals that it is the first to have."""


class _Writer:
    """The ops of the ranks of one device group as they grow."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self._kernel = -1
        """The last op of the compute queue."""
        self._numbers = itertools.count(1)

    def memory(self, like: Bytes, users: int = 1) -> _Memory:
        return _Memory(replace(like, storage=next(self._numbers)), users)

    def freed(self, memory: _Memory) -> tuple[int, ...]:
        """Let one user go; the storage, if it was the last one."""
        memory.users -= 1
        assert memory.users >= 0, f"storage {memory.held} is freed twice"
        return (memory.held.storage,) if memory.held.bytes and not memory.users else ()

    def add(
        self,
        op: Op,
        after: Iterable[int] = (),
        *,
        name: str = "",
        allocates: Iterable[_Memory] = (),
        frees: Iterable[int] = (),
    ) -> int:
        """Append an op like this one. It waits for the ops `after`, and, away from the compute queue, for the kernels
        before it."""
        index, on_device = len(self.ops), is_compute(op.queue)
        awaited = set(after) if on_device else {*after, self._kernel} - {-1}
        # Written out: `replace` takes several times as long, and a step may have 100,000 ops.
        self.ops.append(
            Op(
                index,
                name or op.name,
                op.module,
                op.phase,
                op.queue,
                op.work,
                op.collective,
                tuple(sorted(awaited)),
                tuple(memory.held for memory in allocates if memory.held.bytes),
                tuple(frees),
                op.recomputed,
            )
        )
        if on_device:
            self._kernel = index
        return index

    def add_of(self, op: Op, run: _Run) -> None:
        """Append an op of a task."""
        allocates = []
        for held in op.allocates:
            memory = run.memory[held.storage] = self.memory(held, 1 + run.given.pop(held.storage, 0))
            allocates.append(memory)
        run.ops[op.index] = self.add(
            op,
            [run.ops[other] for other in op.after],
            name=op.name.replace("{}", str(run.number)),
            allocates=allocates,
            frees=[number for storage in op.frees for number in self.freed(run.memory[storage])],
        )

    def merge(self, begin: int, name: str, seconds: float) -> None:
        """Make one op of all from `begin` on, none of which waits for another but in the order of its queue."""
        parts = self.ops[begin:]
        self.ops[begin:] = [
            Op(
                begin,
                name,
                ", ".join(dict.fromkeys(filter(None, (op.module for op in parts)))),
                PAIRED.join(dict.fromkeys(filter(None, (op.phase for op in parts)))),
                work=Work("task", seconds=seconds),
                after=tuple(sorted({other for op in parts for other in op.after if other < begin})),
                allocates=tuple(held for op in parts for held in op.allocates),
                frees=tuple(storage for op in parts for storage in op.frees),
            )
        ]
        self._kernel = begin


class _StageTasks(TaskRunner[_Memory]):
    """Writes the tasks of one stage."""

    def __init__(
        self, writer: _Writer, stage: StageOps, group: DeviceGroup, into: dict[str, _Memory] | None
    ) -> None:
        """`into`: the totals of the stage that it is joined with."""
        self._writer, self.stage = writer, stage
        self._tasks = {
            kind: replace(task, ops=tuple(_placed(op, group) for op in task.ops))
            for kind, task in (
                (TaskKind.FORWARD, stage.forward),
                (TaskKind.INPUT, stage.input),
                (TaskKind.WEIGHT, stage.weight),
            )
        }
        begun = {op.index for task in self._tasks.values() for op in task.ops if op.collective}
        self._waits = {
            op.index
            for task in self._tasks.values()
            for op in task.ops
            if not op.work and not op.collective and begun.intersection(op.after)
        }
        self._in_flight: dict[int, _Run] = {}
        self.totals: dict[str, _Memory] = {}
        """In the order in which they are begun."""
        self._into = self.totals if into is None else into

    def forward_in_turns(
        self, micro_batch: int, batch: Mapping[str, _Memory], received: Mapping[str, _Memory]
    ) -> Turns[_Memory]:
        """As of `TaskRunner`."""
        self._in_flight[micro_batch] = _Run(micro_batch)
        return (yield from self._written(TaskKind.FORWARD, micro_batch, received))

    def input_in_turns(self, micro_batch: int, received: Mapping[str, _Memory]) -> Turns[_Memory]:
        """As of `TaskRunner`."""
        return (yield from self._written(TaskKind.INPUT, micro_batch, received))

    def weight_in_turns(self, micro_batch: int) -> Turns[_Memory]:
        """As of `TaskRunner`."""
        made = yield from self._written(TaskKind.WEIGHT, micro_batch, {})
        del self._in_flight[micro_batch]
        return made

    def _written(
        self, kind: TaskKind, micro_batch: int, received: Mapping[str, _Memory]
    ) -> Generator[None, None, dict[str, _Memory]]:
        task, run = self._tasks[kind], self._in_flight[micro_batch]
        run.memory |= {storage: received[port] for port, storage in task.takes.items()}
        for storage, users in Counter(task.gives.values()).items():
            # What is given has the stage and whoever takes it as users, from the moment at which it is made.
            if storage in run.memory:
                run.memory[storage].users += users
            else:
                run.given[storage] += users
        for op in task.ops:
            total = task.first.get(op.index, task.later.get(op.index))
            begins = total is not None and self._begins(total, run)
            if op.index in self._waits:
                yield
            if total is None or begins == (op.index in task.first):
                self._writer.add_of(op, run)
            if total is not None and begins:
                self._of(total)[total] = run.memory[self.stage.totals[total]]
        return {port: run.memory[storage] for port, storage in task.gives.items()}

    def _of(self, total: str) -> dict[str, _Memory]:
        """Where a total of the stage is kept."""
        return self.totals if total in self.stage.apart else self._into

    def _begins(self, total: str, run: _Run) -> bool:
        """Whether a run is the first that has a total."""
        if total not in self._of(total):
            run.begun.add(total)
        return total in run.begun


def _placed(op: Op, group: DeviceGroup) -> Op:
    """An op whose collective has places in a device group, with global ranks."""
    if op.collective is None:
        return op
    ranks = tuple(group.ranks[place] for place in op.collective.ranks)
    return replace(op, collective=replace(op.collective, ranks=ranks))


class _Rank(InstructionLoop[_Memory]):
    """Writes the step of one device group's ranks."""

    def __init__(
        self,
        program: Program,
        group: DeviceGroup,
        stages: Mapping[int, StageOps],
        transfers: Transfers,
        turns: Mapping[tuple[int, int], Sequence[int]] | None,
        joined: Mapping[int, int],
        hides: Hides | None,
    ) -> None:
        self._writer, self._transfers, self._hides = _Writer(), transfers, hides
        numbers = {
            task.stage
            for one in program.instructions[group.name]
            for task in (program.tasks[run.task] for run in runs_of(one))
            if task.stage is not None
        }
        self._stages: dict[int, _StageTasks] = {}
        for number in sorted(numbers):
            into = self._stages[joined[number]].totals if number in joined else None
            self._stages[number] = _StageTasks(self._writer, stages[number], group, into)
        super().__init__(program, group, self._stages, turns)
        self._named: dict[str, _Memory] = {}
        """What tasks of the whole step give and take."""
        self._posted: dict[tuple[str, int], tuple[int, _Memory]] = {}
        self._sent: dict[tuple[str, int, str], tuple[int, _Memory]] = {}

    def step(self, besides: GroupOps) -> tuple[tuple[Op, ...], tuple[Bytes, ...]]:
        """The ops of the step, and what is there as it begins."""
        resident = tuple(self._writer.memory(held).held for held in besides.resident)
        for task in besides.before:
            self._once(task)
        self._run_all([{}] * self._program.micro_batches)
        self._named |= self._totals()
        for task in besides.after:
            self._once(task)
        return tuple(self._writer.ops), resident

    def _totals(self) -> dict[str, _Memory]:
        """What the stages have added up, with a sum of what several of them have a part of, as of a tied weight."""
        found: dict[str, _Memory] = {}
        for number, tasks in self._stages.items():
            for name, part in tasks.totals.items():
                if name not in found:
                    found[name] = part
                    continue
                op = tasks.stage.sums.get(name)
                if op is None:
                    raise ProgramError(f"stage {number} has no op that adds {name} to that of another stage")
                (held,) = op.allocates
                parts, found[name] = (found[name], part), self._writer.memory(held)
                frees = [storage for one in parts for storage in self._writer.freed(one)]
                self._writer.add(op, allocates=[found[name]], frees=frees)
        return found

    def _once(self, task: TaskOps) -> None:
        missing = task.takes.keys() - self._named.keys()
        if missing:
            raise ProgramError(
                f"a task of {self._group.name} takes {sorted(missing)}, which nothing before it gives"
            )
        run = _Run(memory={storage: self._named[name] for name, storage in task.takes.items()})
        for op in task.ops:
            self._writer.add_of(op, run)
        self._named |= {name: run.memory[storage] for name, storage in task.gives.items()}

    def _pair(self, forward: Run, backward: Run, batches: Sequence[Mapping[str, _Memory]]) -> None:
        begin = len(self._writer.ops)
        super()._pair(forward, backward, batches)
        if self._hides is None:
            return
        ahead, back = (self._program.tasks[run.task] for run in (forward, backward))
        assert ahead.stage is not None, "a task of a micro-batch belongs to a stage"
        assert back.stage is not None, "a task of a micro-batch belongs to a stage"
        works = [op.work for op in self._writer.ops[begin:] if op.work is not None]
        seconds = sum(work.seconds or 0.0 for work in works) - self._hides(ahead.stage, back.stage, back.kind)
        whole = back.kind is TaskKind.BACKWARD and not back.gives
        kinds = (TaskKind.FORWARD, TaskKind.BACKWARD if whole else TaskKind.INPUT)
        runs = zip(kinds, (ahead, back), (forward, backward), strict=True)
        names = [f"{kind[0].upper()}{task.stage}.{run.micro_batch}" for kind, task, run in runs]
        self._writer.merge(begin, PAIRED.join(names), seconds)

    # What the loop does with storages.

    def _begins(self, place: int) -> None:
        pass

    def _post(self, one: Recv) -> None:
        transfer = self._transfers.to(one.port, self._group.name)
        kind: Kind = "activation" if self._transfers.is_forward(one.port) else "temporary"
        buffer = self._writer.memory(Bytes(0, transfer.taken, kind))
        self._writer.add(Op(0, "post", phase=self._phase(one.port)), allocates=[buffer])
        index = self._writer.add(self._call(one, "recv", f"comm:from {one.source}", transfer))
        self._posted[one.port, one.micro_batch] = index, buffer

    def _send(self, one: Send, value: _Memory) -> None:
        op = self._call(one, "send", f"comm:to {one.to}", self._transfers.to(one.port, one.to))
        self._sent[one.port, one.micro_batch, one.to] = self._writer.add(op), value

    def _wait(self, one: Wait) -> _Memory:
        sending = self._sent.pop((one.port, one.micro_batch, one.peer), None)
        if sending is not None:
            index, value = sending
            self._await(str(one), one.port, index, self._writer.freed(value))
            return value
        index, value = self._posted.pop((one.port, one.micro_batch))
        self._await(str(one), one.port, index)
        transfer = self._transfers.to(one.port, self._group.name)
        if transfer.exchanged:
            call = Collective("all_to_all", tuple(self._group.ranks), transfer.exchanged, AXIS)
            name, queue = f"exchange of {one.port}", f"comm:{AXIS}"
            op = Op(0, name, phase=self._phase(one.port), queue=queue, collective=call)
            self._await(f"end of {name}", one.port, self._writer.add(op))
        return value

    def _drain(self) -> None:
        for (port, _, _), (index, value) in self._sent.items():
            self._await("end of the schedule", port, index, self._writer.freed(value))

    def _call(self, one: Send | Recv, kind: str, queue: str, transfer: Transfer) -> Op:
        call = Collective(
            kind, transfer.ends, transfer.sent, AXIS, f"{one.port}, micro-batch {one.micro_batch}"
        )
        return Op(0, str(one), phase=self._phase(one.port), queue=queue, collective=call)

    def _await(self, name: str, port: str, index: int, frees: tuple[int, ...] = ()) -> None:
        self._writer.add(Op(0, name, phase=self._phase(port)), [index], frees=frees)

    def _phase(self, port: str) -> str:
        return "forward" if self._transfers.is_forward(port) else "backward"
