"""The verifier on Programs that are known to hang or to be wrong: each is refused, with the instructions named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from harness.programs import B, F, chain, groups_of, one_forward_one_backward, program_of, stage_tasks
from hyper_parallel.errors import ProgramError
from hyper_parallel.layout import Layout, Mesh
from hyper_parallel.program import (
    DefectKind,
    DeviceGroup,
    Instruction,
    Port,
    Program,
    Recv,
    Run,
    Send,
    Task,
    TaskKind,
    Wait,
    find_defects,
    verify,
)
from hyper_parallel.schedule import Action, Schedule


def with_list(program: Program, group: str, instructions: Sequence[Instruction]) -> Program:
    return replace(program, instructions={**program.instructions, group: tuple(instructions)})


def edited(program: Program, group: str, edit: Callable[[list[Instruction]], object]) -> Program:
    """The Program with a change to one group's list."""
    instructions = list(program.instructions[group])
    edit(instructions)
    return with_list(program, group, instructions)


def kinds(program: Program) -> set[DefectKind]:
    return {defect.kind for defect in find_defects(program)}


def texts(program: Program) -> str:
    return "\n".join(map(str, find_defects(program)))


# Programs that torch.distributed.pipelining accepts and then hangs on.


def interleaved(*orders: str) -> Schedule:
    """Two ranks with stages 0, 2 and 1, 3. Orders as torch prints them: ``0F1`` is stage 0, micro-batch 1."""
    actions = tuple(
        tuple(Action(F if text[1] == "F" else B, int(text[0]), int(text[2])) for text in order.split())
        for order in orders
    )
    return Schedule("interleaved 1F1B", (0, 1, 0, 1), actions, 4)


INTERLEAVED = interleaved(
    "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
    "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
)


def deferred(program: Program, before_sends: Sequence[str] = ()) -> Program:
    """Receives posted only when their task is next; in the groups `before_sends` before the sends ahead of it."""
    for group, instructions in program.instructions.items():
        order: list[Instruction] = []
        for one in instructions:
            if isinstance(one, Recv):
                continue
            if isinstance(one, Wait) and program.ports[one.port].group != group:
                at = len(order)
                while group in before_sends and at and isinstance(order[at - 1], Send | Wait):
                    at -= 1
                order.insert(at, Recv(one.port, one.micro_batch, one.peer))
            order.append(one)
        program = with_list(program, group, order)
    return program


def test_interleaved_1f1b_is_accepted() -> None:
    """The compute order of the report, with the receives where `to_program` posts them."""
    for depth in (1, 2, 4):
        verify(program_of(INTERLEAVED, depth=depth))


def test_deferred_receives_block_as_reported_in_pytorch_172668() -> None:
    """Both ranks sit in a send, and neither has posted: ``0SendF1, 2RecvF0`` against ``1SendF0, 1RecvF1``."""
    program = deferred(program_of(INTERLEAVED))
    with pytest.raises(ProgramError) as error:
        verify(program)
    text = str(error.value)
    assert "g0, g1 wait for each other in a cycle" in text
    assert (
        "g0 (rank 0) stands at instruction 3, Send(x0-1.0, micro-batch 1) to g1, and waits until g1 posts"
        in text
    )
    assert "Recv(x0-1.0, micro-batch 1) from g0" in text
    assert "Send(x1-2.0, micro-batch 0) to g0, and waits until g0 posts" in text
    assert not find_defects(program, rendezvous=False), "one node, asynchronous sends: it ran"


def test_receives_before_sends_on_odd_ranks_block_as_reported_in_pytorch_172668() -> None:
    """The Megatron-like repair in the same report: ``0SEND_F2`` waits for ``1RECV_F2`` behind ``3SEND_B0``."""
    program = deferred(program_of(INTERLEAVED), before_sends=("g1",))
    found = find_defects(program)
    assert [defect.kind for defect in found] == [DefectKind.DEADLOCK]
    assert "stands at" in found[0].text
    assert "Send(x0-1.0, micro-batch 2) to g1" in found[0].text
    assert "Send(dx2-3.0, micro-batch 0) to g0" in found[0].text


@pytest.mark.parametrize("rendezvous", [True, False])
def test_a_last_warm_up_send_behind_a_gradient_blocks_as_in_torchtitan_775(rendezvous: bool) -> None:
    """Fewer micro-batches than stages: 1F1B keeps the only forward send back for a batch with the first gradient's
    receive. Where no part of a batch starts before all can, the send comes after the gradient."""
    program = program_of(one_forward_one_backward(4, 1))
    for group in ("g0", "g1", "g2"):

        def hold(order: list[Instruction]) -> None:
            send = next(one for one in order if isinstance(one, Send) and one.port.startswith("x"))
            order.remove(send)
            gradient = next(
                i for i, one in enumerate(order) if isinstance(one, Wait) and one.port.startswith("dx")
            )
            order.insert(gradient + 1, send)

        program = edited(program, group, hold)
    found = find_defects(program, rendezvous=rendezvous)
    assert [defect.kind for defect in found] == [DefectKind.DEADLOCK]
    assert "Wait(dx0-1.0, micro-batch 0) for g1" in found[0].text
    assert "issues its instruction" in found[0].text


def test_a_skip_connection_with_batched_transfers_blocks_as_in_pippy_969() -> None:
    """Stage 2 takes from 0 and from 1, and receives what 0 sends only after what 1 sends: a cycle of three groups."""
    edges = {**chain(3), (0, 2): 1}
    program = program_of(one_forward_one_backward(3, 1), edges)

    def skip_first(order: list[Instruction]) -> None:
        send = order.index(Send("x0-2.0", 0, "g2"))
        order.insert(order.index(Send("x0-1.0", 0, "g1")), order.pop(send))

    def batched(order: list[Instruction]) -> None:
        receive = order.pop(order.index(Recv("x0-2.0", 0, "g0")))
        order.remove(Wait("x0-2.0", 0, "g0"))
        at = order.index(Wait("x1-2.0", 0, "g1")) + 1
        order[at:at] = [receive, Wait("x0-2.0", 0, "g0")]

    program = edited(edited(program, "g0", skip_first), "g2", batched)
    (defect,) = find_defects(program)
    assert "g0, g2, g1 wait for each other" in defect.text
    assert not find_defects(program, rendezvous=False)


# Defects of one kind each.


def small(**settings: int) -> Program:
    return program_of(one_forward_one_backward(2, 2), **settings)


def test_a_send_without_a_receive_and_a_receive_without_a_send() -> None:
    program = small()
    without = edited(program, "g1", lambda order: order.remove(Recv("x0-1.0", 1, "g0")))
    assert "g0's instruction 5, Send(x0-1.0, micro-batch 1) to g1, has no matching Recv in g1" in texts(
        without
    )
    without = edited(program, "g0", lambda order: order.remove(Send("x0-1.0", 1, "g1")))
    assert "Recv(x0-1.0, micro-batch 1) from g0, has no matching Send in g0" in texts(without)


def test_orders_of_a_channel_that_differ() -> None:
    def swap(order: list[Instruction]) -> None:
        first, second = (order.index(Recv("x0-1.0", m, "g0")) for m in (0, 1))
        order[first], order[second] = order[second], order[first]

    program = edited(small(), "g1", swap)
    assert kinds(program) == {DefectKind.CHANNEL}
    assert (
        "Send(x0-1.0, micro-batch 0) to g1, would meet g1's instruction 0, Recv(x0-1.0, micro-batch 1)"
        in texts(program)
    )


def test_a_value_used_before_it_is_there() -> None:
    program = edited(small(), "g1", lambda order: order.remove(Wait("x0-1.0", 1, "g0")))
    assert kinds(program) == {DefectKind.VALUE}
    assert "takes 'x0-1.0' of micro-batch 1, whose receive is posted and has not been waited for" in texts(
        program
    )

    def early(order: list[Instruction]) -> None:
        order.insert(order.index(Run("F0", 1)), order.pop(order.index(Send("x0-1.0", 1, "g1"))))

    assert "sends 'x0-1.0' of micro-batch 1, which no task of the group has given yet" in texts(
        edited(small(), "g0", early)
    )


def test_a_received_value_that_nobody_takes() -> None:
    program = small()
    tasks = {**program.tasks, "F1": replace(program.tasks["F1"], takes=())}
    assert "g1 receives 'x0-1.0' of micro-batch 0, and none of its tasks takes it" in texts(
        replace(program, tasks=tasks)
    )


def test_transfers_and_waits_that_happen_twice_or_for_nothing() -> None:
    program = small()
    for one, text in (
        (Recv("x0-1.0", 1, "g0"), "posts the same receive a second time"),
        (Wait("x0-1.0", 1, "g0"), "waits a second time"),
        (Send("dx0-1.0", 1, "g0"), "sends the same value a second time"),
    ):
        assert text in texts(edited(program, "g1", lambda order, one=one: order.append(one)))
    first = edited(program, "g0", lambda order: order.insert(0, Wait("x0-1.0", 0, "g1")))
    assert "waits for a send that has not been issued" in texts(first)
    first = edited(program, "g1", lambda order: order.insert(0, Wait("x0-1.0", 0, "g0")))
    assert "waits for a receive that has not been posted" in texts(first)


def test_tasks_that_run_twice_or_never() -> None:
    program = small()
    twice = edited(program, "g0", lambda order: order.append(Run("F0", 1)))
    assert "task 'F0' runs 2 times for micro-batch 1" in texts(twice)
    never = edited(program, "g1", lambda order: order.remove(Run("B1", 1)))
    assert "stage 1 runs no backward task for micro-batch 1" in texts(never)


def test_half_of_a_split_backward_pass_is_refused() -> None:
    orders = ((Action(F, 0, 0), Action(TaskKind.INPUT, 0, 0), Action(TaskKind.WEIGHT, 0, 0)),)
    program = program_of(Schedule("split", (0,), orders, 1))
    verify(program)
    half = edited(program, "g0", lambda order: order.remove(Run("W0", 0)))
    assert "stage 0 runs input for micro-batch 0" in texts(half)
    swapped = with_list(
        program,
        "g0",
        [Run("F0", 0), Run("W0", 0), Run("I0", 0)],
    )
    assert "Run(W0, micro-batch 0), comes before the input task" in texts(swapped)


# Declarations.


def two_groups() -> tuple[DeviceGroup, DeviceGroup]:
    return DeviceGroup(Mesh(("shard", 2)), (0, 1), "a"), DeviceGroup(Mesh(("shard", 3)), (2, 3, 4), "b")


def declared(port: Port, group_b: DeviceGroup | None = None) -> Program:
    """Stage 0 on a sends `x` to stage 1 on b, forward only."""
    a, b = two_groups()
    b = group_b or b
    tasks = (Task("f0", F, "a", (), ("x",), 0), Task("f1", F, "b", ("x",), (), 1))
    lists: dict[str, tuple[Instruction, ...]] = {
        "a": (Run("f0", 0), Send("x", 0, "b")),
        "b": (Recv("x", 0, "a"), Wait("x", 0, "a"), Run("f1", 0)),
    }
    return Program({"a": a, "b": b}, {t.name: t for t in tasks}, {"x": port}, lists, 1)


def test_layouts_of_both_ends() -> None:
    a, b = two_groups()
    whole_a, whole_b = Layout.replicated(a.mesh, (4, 6)), Layout.replicated(b.mesh, (4, 6))
    verify(declared(Port("x", whole_a, "float32", "a", {"b": whole_b})))
    assert "port 'x' has no layout in b, whose mesh is not a's" in texts(
        declared(Port("x", whole_a, "float32", "a"))
    )
    other = Layout.replicated(b.mesh, (4, 5))
    assert "has shape (4, 6) in a, which sends it, and (4, 5) in b" in texts(
        declared(Port("x", whole_a, "float32", "a", {"b": other}))
    )
    wrong = Layout.replicated(a.mesh, (4, 6))
    assert "its layout in b is on the mesh {'shard': 2}" in texts(
        declared(Port("x", whole_a, "float32", "a", {"b": wrong}))
    )
    unknown = Layout(a.mesh, (4, 6), (("tensor",), ()))
    assert "names axis ['tensor']" in texts(declared(Port("x", unknown, "float32", "a", {"b": whole_b})))


def test_a_rank_with_two_lists() -> None:
    a, b = two_groups()
    shared = DeviceGroup(b.mesh, (1, 2, 3), "b")
    port = Port("x", Layout.replicated(a.mesh, (4,)), "float32", "a", {"b": Layout.replicated(b.mesh, (4,))})
    assert "rank 1 is in a and in b, and both have instructions" in texts(declared(port, shared))


def test_instructions_that_name_what_is_not_there() -> None:
    program = small()
    for one, text in (
        (Run("F9", 0), "names a task that the program does not have"),
        (Run("F1", 0), "runs a task of g1"),
        (Run("F0", 2), "needs a micro-batch from 0 to 1"),
        (Send("y", 0, "g1"), "names a port that the program does not have"),
        (Send("x0-1.0", 0, "g7"), "names 'g7', which is no group with instructions"),
        (Send("x0-1.0", 0, "g0"), "is to the group itself"),
        (Send("dx0-1.0", 0, "g1"), "sends a value that g1 computes"),
        (Recv("x0-1.0", 0, "g1"), "receives from g1 a value that g0 computes"),
    ):
        found = texts(edited(program, "g0", lambda order, one=one: order.append(one)))
        assert text in found, found


def test_stages_and_givers() -> None:
    program = small()
    tasks = {**program.tasks, "F1": replace(program.tasks["F1"], stage=0)}
    assert "tasks of stage 0 run on g0 and on g1" in texts(replace(program, tasks=tasks))
    tasks = {**program.tasks, "F1": replace(program.tasks["F1"], gives=("x0-1.0",))}
    assert "gives port 'x0-1.0', which g0 computes" in texts(replace(program, tasks=tasks))
    tasks = {**program.tasks, "F0": replace(program.tasks["F0"], gives=())}
    assert "no task gives port 'x0-1.0'" in texts(replace(program, tasks=tasks))


def test_all_tasks_of_a_stage_are_needed_by_name() -> None:
    groups = groups_of(1)
    tasks, ports = stage_tasks(groups, (0,), {})
    assert not ports
    doubled = {**{t.name: t for t in tasks if t.name in ("F0", "B0")}}
    doubled["B0b"] = replace(doubled["B0"], name="B0b")
    program = Program({"g0": groups[0]}, doubled, {}, {"g0": (Run("F0", 0), Run("B0", 0))}, 1)
    assert "stage 0 has two backward tasks, 'B0' and 'B0b'" in texts(program)
