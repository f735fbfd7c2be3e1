"""An expanded Program is what its instruction lists say: ops in the order of the walk, transfers of the right sizes
that meet, and memory that is freed by the last who uses it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from harness.programs import postpone, program_of, random_program
from harness.stage_tasks import SAVED, as_built, once, simulated, unit_stage
from harness.step_programs import chain_kind
from hyper_parallel.errors import ProgramError
from hyper_parallel.layout import DeviceGroup, Layout, Mesh
from hyper_parallel.program import (
    GroupOps,
    Port,
    Program,
    Recv,
    Send,
    StageOps,
    TaskKind,
    TaskOps,
    Wait,
    expand,
    find_defects,
)
from hyper_parallel.program.instruction_loop import InstructionLoop, TaskRunner, Turns
from hyper_parallel.program.transfers import Transfers
from hyper_parallel.runtime.build_program import step_program
from hyper_parallel.schedule import Costs, MicroBatchKind, named_schedule, step_schedule, with_steady_pairs
from hyper_parallel.trace import Bytes, Collective, Op, Trace
from hyper_parallel.trace.live_bytes import LiveBytes
from hyper_parallel.workload import Work


class _Tasks(TaskRunner[str]):
    """Tells which tasks of a stage run."""

    def __init__(self, said: list[str], stage: int, gives: Mapping[TaskKind, Sequence[str]]) -> None:
        self._said, self._stage, self._gives = said, stage, gives

    def _run(self, letter: str, micro_batch: int, kinds: Sequence[TaskKind]) -> Turns[str]:
        self._said.append(f"{letter}{self._stage}.{micro_batch}")
        yield from ()
        return {port: port for kind in kinds for port in self._gives.get(kind, ())}

    def forward_in_turns(
        self, micro_batch: int, batch: Mapping[str, str], received: Mapping[str, str]
    ) -> Turns[str]:
        return self._run("F", micro_batch, [TaskKind.FORWARD])

    def input_in_turns(self, micro_batch: int, received: Mapping[str, str]) -> Turns[str]:
        return self._run("I", micro_batch, [TaskKind.BACKWARD, TaskKind.INPUT])

    def weight_in_turns(self, micro_batch: int) -> Turns[str]:
        return self._run("W", micro_batch, [])


class _Recorded(InstructionLoop[str]):
    """What a rank would do, as text."""

    def __init__(self, program: Program, group: str) -> None:
        self.said: list[str] = []
        gives: dict[int, dict[TaskKind, tuple[str, ...]]] = {}
        for task in program.tasks.values():
            if task.stage is not None and task.group == group:
                gives.setdefault(task.stage, {})[task.kind] = task.gives
        runners = {stage: _Tasks(self.said, stage, ports) for stage, ports in gives.items()}
        super().__init__(program, program.groups[group], runners)
        self._run_all([{}] * program.micro_batches)

    def _begins(self, place: int) -> None:
        pass

    def _post(self, one: Recv) -> None:
        self.said.append(str(one))

    def _send(self, one: Send, value: str) -> None:
        self.said.append(str(one))

    def _wait(self, one: Wait) -> str:
        self.said.append(str(one))
        return one.port

    def _drain(self) -> None:
        pass


def _stages(program: Program, size: int = 0, left: int = SAVED) -> dict[int, StageOps]:
    numbers = {task.stage for task in program.tasks.values() if task.stage is not None}
    return {stage: unit_stage(program, stage, size=size, left=left) for stage in numbers}


def _expanded(program: Program, size: int = 0) -> Trace:
    return expand(program, _stages(program, size), sizes=dict.fromkeys(program.ports, size))


@pytest.mark.parametrize("seed", range(30))
def test_the_ops_of_a_rank_are_what_its_loop_does(seed: int) -> None:
    program = as_built(random_program(random.Random(seed)))
    trace = _expanded(program, 4)
    for group in program.instructions:
        assert [op.name for op in trace.ops[group] if op.name != "post"] == _Recorded(program, group).said


@pytest.mark.parametrize("seed", range(30))
def test_both_ends_of_a_transfer_meet_and_all_memory_is_freed(seed: int) -> None:
    program = as_built(random_program(random.Random(seed)))
    timeline = simulated(program, _stages(program, 4, 60), size=4, latency=0.125)
    ends: dict[str, list[tuple[str, float, float]]] = {}
    for span in timeline.spans:
        if span.op.collective is not None:
            ends.setdefault(span.op.collective.tag, []).append((span.op.sort, span.start, span.end))
    sends = [one for order in program.instructions.values() for one in order if isinstance(one, Send)]
    assert len(ends) == len(sends)
    for first, second in ends.values():
        assert {first[0], second[0]} == {"send", "recv"} and first[1:] == second[1:]
        assert first[2] - first[1] >= 4.125
    for group, ops in timeline.trace.ops.items():
        live, sizes = LiveBytes(), dict[int, int]()
        for op in ops:
            sizes |= {held.storage: held.bytes for held in op.allocates}
            live.add(sum(held.bytes for held in op.allocates))
            live.add(-sum(sizes.pop(storage) for storage in op.frees))
        assert not sizes and live.alive == 0, group


def test_a_value_is_held_by_its_transfer_and_by_who_takes_it() -> None:
    """GPipe of two stages: all forward passes are ahead."""
    program = as_built(program_of(named_schedule("gpipe", 2, 4)))
    timeline = simulated(program, _stages(program, 8), size=8, latency=0.0)
    # In the last forward pass: what was saved of 4 micro-batches, its own value and two that are still on their way,
    # and the buffers for two gradients.
    assert timeline.peak_of("g0").bytes == 4 * SAVED + 3 * 8 + 2 * 8
    # In the last forward pass, the value that it takes.
    assert timeline.peak_of("g1").bytes == 4 * SAVED + 8


def test_without_the_wait_for_it_a_sent_value_lasts_to_the_end() -> None:
    program = as_built(program_of(named_schedule("gpipe", 2, 2)))
    first = program.instructions["g0"]
    sends = [one for one in first if isinstance(one, Send)]
    left = tuple(
        one for one in first if not (isinstance(one, Wait) and program.ports[one.port].group == "g0")
    )
    trace = _expanded(replace(program, instructions={**program.instructions, "g0": left}), 8)
    last = [op for op in trace.ops["g0"] if op.name == "end of the schedule"]
    assert len(last) == len(sends) == 2
    assert all(op.frees for op in last)


def test_transfers_between_equal_meshes_are_what_a_rank_has() -> None:
    program = as_built(program_of(named_schedule("1f1b", 2, 2), ranks=2))
    (forward,) = [name for name in program.ports if name.startswith("x")]
    found = Transfers(program, {forward: 40}).to(forward, "g1")
    # [4, 2] float32 where it is not said otherwise.
    assert (found.ends, found.sent, found.taken, found.exchanged) == ((0, 2), 40, 40, 0)
    assert Transfers(program, {}).to(forward, "g1").sent == 32
    slowest = Transfers(program, {}, lambda ends: ends[-1]).to(forward, "g1")
    assert slowest.ends == (1, 3)


def test_transfers_between_unlike_meshes_are_the_boxes_of_their_plan() -> None:
    four = DeviceGroup(Mesh(("shard", 4)), (0, 1, 2, 3), "a")
    two = DeviceGroup(Mesh(("tensor_x", 2)), (4, 5), "b")
    split, whole = Layout.replicated(four.mesh, (8, 2)).split(0, "shard"), Layout.replicated(two.mesh, (8, 2))
    port = Port("x", split, "bfloat16", "a", {"b": whole})
    program = Program({"a": four, "b": two}, {}, {"x": port}, {}, 1)
    found = Transfers(program, {}).to("x", "b")
    # Each of the two receives half of all 32 bytes, and gives that half to the other one.
    assert (found.sent, found.taken, found.exchanged) == (16, 32, 16)
    assert found.ends[1] in two.ranks


def test_a_program_that_cannot_run_is_refused() -> None:
    draw = random.Random(5)
    stuck = 0
    for _ in range(60):
        program = as_built(postpone(draw, random_program(draw)))
        if find_defects(program):
            stuck += 1
            with pytest.raises(ProgramError, match="the program cannot run"):
                _expanded(program)
    assert stuck > 5


def test_the_expansion_of_submodels_runs_the_stages_of_each_kind() -> None:
    groups = [
        DeviceGroup(Mesh(("tensor_x", size)), tuple(range(first, first + size)), name)
        for name, first, size in (("a", 0, 2), ("b", 2, 1), ("c", 3, 3))
    ]
    kinds = [chain_kind(1, groups, [0, 1, 2], 2), chain_kind(2, groups, [1, 2], 3)]
    priced = [MicroBatchKind.chain(Costs.even(len(one.placement)), one.placement, one.count) for one in kinds]
    schedule = step_schedule(priced, len(groups)).schedule
    program, _ = step_program(kinds, schedule, groups)
    timeline = simulated(program, _stages(program), latency=0.25)
    trace = timeline.trace
    assert trace.classes == {0: "a", 1: "a", 2: "b", 3: "c", 4: "c", 5: "c"}
    for group in program.instructions:
        names = [op.name for op in trace.ops[group] if "exchange" not in op.name and op.name != "post"]
        assert names == _Recorded(program, group).said
    # One element of 4 bytes to each group: what two ranks of a group take crosses once, and they exchange it.
    sent = [op.collective for op in trace.ops["b"] if op.collective and op.collective.kind == "send"]
    assert {(call.bytes, call.ranks[0]) for call in sent} == {(4, 2), (8, 2)}
    assert any(op.name.startswith("exchange of") for op in trace.ops["c"])
    runs = sum(len([op for op in ops if op.work]) for ops in trace.ops.values())
    assert runs == 3 * (3 * 2 + 2 * 3)


def test_pairs_run_in_turns_at_the_waits_of_their_tasks() -> None:
    """A forward pass of two products around a collective, beside gradients of inputs of one product around another."""
    schedule = with_steady_pairs(named_schedule("1f1b", 2, 4, paired=True))
    program = as_built(program_of(schedule, ranks=2))

    def task(letter: str, first: int, takes: Mapping[str, int], gives: Mapping[str, int]) -> TaskOps:
        call = Collective("all_reduce", (0, 1), 4, "tensor")
        names = [f"{letter}{{}} begins", f"{letter}{{}} sums", f"{letter}{{}} waits", f"{letter}{{}} ends"]
        return TaskOps(
            (
                Op(first, names[0], work=Work("matmul", flops=1)),
                Op(first + 1, names[1], queue="comm:tensor", collective=call, after=(first,)),
                Op(first + 2, names[2], after=(first + 1,)),
                Op(
                    first + 3,
                    names[3],
                    work=Work("matmul", flops=1),
                    allocates=tuple(Bytes(storage, 0, "temporary") for storage in gives.values()),
                    frees=(*takes.values(), *gives.values()),
                ),
            ),
            takes,
            gives,
        )

    stages = {}
    for stage in range(2):
        plain = unit_stage(program, stage)
        forward = task("F", 0, plain.forward.takes, plain.forward.gives)
        back = task("I", 4, plain.input.takes, plain.input.gives)
        stages[stage] = StageOps(forward, back, TaskOps((Op(8, "W{}", work=Work("matmul", flops=1)),)))
    trace = expand(program, stages)
    names = [op.name for op in trace.ops["g1"]]
    at = names.index("F1 begins")
    assert names[at : at + 2] == ["F1 begins", "F1 sums"] and "I0 begins" in names[at : at + 4]
    ops = {op.name: op for op in trace.ops["g1"]}
    # A collective of one task is begun behind the kernels of both.
    behind = trace.ops["g1"][ops["I0 sums"].after[-1]]
    assert behind.name == "I0 begins" and ops["F1 waits"].after == (ops["F1 sums"].index,)
    assert ops["F1 sums"].collective == Collective("all_reduce", (2, 3), 4, "tensor")


def test_later_micro_batches_add_to_what_the_first_one_leaves() -> None:
    program = as_built(program_of(named_schedule("1f1b", 1, 3)))
    weight = TaskOps(
        (
            Op(2, "gradient {}", work=Work("matmul", flops=1), allocates=(Bytes(7, 10, "gradient"),)),
            Op(3, "add {}", work=Work("elementwise", vector_flops=1), frees=(7,)),
        ),
        later={3: "total"},
    )
    forward, back = (TaskOps((Op(at, name + " {}"),)) for at, name in enumerate("FI"))
    reduce = TaskOps((Op(0, "reduce", frees=(1,)),), takes={"total": 1})
    groups = {"g0": GroupOps(before=(once("gather", 1.0),), after=(reduce,))}
    stage = StageOps(forward, back, weight, {"total": 7})
    trace = expand(program, {0: stage}, groups)
    ops = trace.ops["g0"]
    assert [op.name for op in ops if op.work] == [
        "gather",
        "gradient 0",
        "gradient 1",
        "add 1",
        "gradient 2",
        "add 2",
    ]
    (total,) = next(op for op in ops if op.name == "gradient 0").allocates
    assert ops[-1].name == "reduce" and ops[-1].frees == (total.storage,)
    with pytest.raises(ProgramError, match="which nothing before it gives"):
        expand(program, {0: replace(stage, totals={}, weight=replace(weight, later={}))}, groups)


def test_totals_of_two_stages_of_a_rank_are_summed_behind_the_schedule() -> None:
    program = as_built(program_of(named_schedule("interleaved-1f1b", 1, 2, virtual=2)))
    stages = {}
    for number in range(2):
        plain = unit_stage(program, number)
        add = Op(3, "add {}", work=Work("elementwise", vector_flops=1), frees=(7,))
        made = Op(2, "gradient {}", work=Work("matmul", flops=1), allocates=(Bytes(7, 10, "gradient"),))
        weight = TaskOps((*plain.weight.ops, made, add), later={3: "total"})
        both = Op(4, "sum", work=Work("elementwise", vector_flops=1), allocates=(Bytes(8, 10, "gradient"),))
        stages[number] = replace(plain, weight=weight, totals={"total": 7}, sums={"total": both})
    ops = expand(program, stages).ops["g0"]
    assert [op.name for op in ops if op.work][-1] == "sum" and sum(op.name == "sum" for op in ops) == 1
    begun = [held.storage for op in ops for held in op.allocates if op.name.startswith("gradient")]
    # The first micro-batch of each stage leaves its own, which are freed as their sum is there.
    (sum_,) = (op for op in ops if op.name == "sum")
    assert set(sum_.frees) < set(begun) and len(sum_.frees) == 2
    with pytest.raises(ProgramError, match="no op that adds total"):
        expand(program, {**stages, 1: replace(stages[1], sums={})})
