"""Programs from schedules: order of tasks, transfers from the data flow, receives posted ahead within a bound."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

from harness.programs import (
    B,
    F,
    chain,
    groups_of,
    one_forward_one_backward,
    program_of,
    random_program,
    stage_tasks,
)
from hyper_parallel.errors import ProgramError, StrategyError
from hyper_parallel.program import (
    Program,
    Recv,
    Run,
    Send,
    Task,
    Wait,
    find_defects,
    to_program,
    verify,
)
from hyper_parallel.schedule import Action, Schedule


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 9])
@pytest.mark.parametrize("depth", [1, 4])
def test_1f1b_with_any_number_of_micro_batches_is_accepted(
    stages: int, micro_batches: int, depth: int
) -> None:
    """Fewer micro-batches than stages too, which torchtitan 775 hangs on and torch refuses since."""
    verify(program_of(one_forward_one_backward(stages, micro_batches), depth=depth))


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("groups", "task .* runs on group 'g1', which the program does not have: it has g0$"),
        ("ports", "task .* names port '.*', which the program does not have"),
    ],
)
def test_a_task_names_what_the_program_has(part: str, words: str) -> None:
    program = program_of(one_forward_one_backward(2, 3))
    some = dict([next(iter(getattr(program, part).items()))])
    with pytest.raises(StrategyError, match=words):
        dataclasses.replace(program, **{part: some})


def test_random_programs_are_accepted() -> None:
    for seed in range(200):
        program = random_program(random.Random(seed), 4, 6)
        assert not find_defects(program), seed
        assert not find_defects(program, rendezvous=False), seed


def test_a_group_runs_its_actions_in_the_schedules_order() -> None:
    schedule = one_forward_one_backward(3, 4)
    program = program_of(schedule)
    for rank, order in enumerate(schedule.orders):
        ran = [
            (one.task, one.micro_batch) for one in program.instructions[f"g{rank}"] if isinstance(one, Run)
        ]
        assert ran == [(str(a).split(".")[0], a.micro_batch) for a in order]


def test_a_send_follows_the_task_that_gives_its_value() -> None:
    program = random_program(random.Random(3), 4, 4)
    for instructions in program.instructions.values():
        last: Run | None = None
        for one in instructions:
            if isinstance(one, Run):
                last = one
            elif isinstance(one, Send):
                assert last is not None
                assert (one.port in program.tasks[last.task].gives, one.micro_batch) == (
                    True,
                    last.micro_batch,
                )


def test_stages_of_one_group_exchange_values_in_memory() -> None:
    orders = ((Action(F, 0, 0), Action(F, 1, 0), Action(B, 1, 0), Action(B, 0, 0)),)
    program = program_of(Schedule("both", (0, 0), orders, 1))
    assert not any(isinstance(one, Send | Recv | Wait) for one in program.instructions["g0"])
    verify(program)


def test_a_value_of_an_early_stage_goes_once_to_each_group_that_takes_it() -> None:
    """An encoder's memory: stage 0 gives it, and stages 1 to 4 on two groups take it."""
    placement = (0, 1, 2, 1, 2)
    edges = {**chain(5), (0, 1): 2, (0, 2): 1, (0, 3): 1, (0, 4): 1}
    order = [Action(F, s, 0) for s in range(5)] + [Action(B, s, 0) for s in reversed(range(5))]
    orders = tuple(tuple(a for a in order if placement[a.stage] == rank) for rank in range(3))
    groups = groups_of(3)
    tasks, ports = stage_tasks(groups, placement, edges)
    # One port for the memory, taken by all decoder stages.
    memory = "x0-1.1"
    used = {(a.stage, a.kind) for a in order}
    dropped = {
        port.name
        for port in ports
        if port.name.startswith("x0-") and port.name.split(".")[0] in ("x0-2", "x0-3", "x0-4")
    }
    shared = []
    for task in tasks:
        if (task.stage, task.kind) not in used:
            continue
        takes = tuple(port for port in task.takes if port not in dropped)
        if task.kind is F and task.stage:
            takes = tuple(dict.fromkeys((*takes, memory)))
        shared.append(
            Task(
                task.name,
                task.kind,
                task.group,
                takes,
                tuple(p for p in task.gives if p not in dropped),
                task.stage,
            )
        )
    schedule = Schedule("encoder", placement, orders, 1)
    program = to_program(schedule, groups, shared, [port for port in ports if port.name not in dropped])
    verify(program)
    sends = [one for one in program.instructions["g0"] if isinstance(one, Send) and one.port == memory]
    assert [one.to for one in sends] == ["g1", "g2"]


def most_outstanding(program: Program, group: str) -> int:
    """Receives of one port that are posted and not waited for, at most."""
    posted: Counter[str] = Counter()
    most = 0
    for one in program.instructions[group]:
        if isinstance(one, Recv):
            posted[one.port] += 1
            most = max(most, posted[one.port])
        elif isinstance(one, Wait) and posted[one.port]:
            posted[one.port] -= 1
    return most


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_depth_bounds_the_receives_that_are_posted(depth: int) -> None:
    program = program_of(one_forward_one_backward(4, 8), depth=depth)
    assert [most_outstanding(program, group) for group in ("g1", "g2", "g3")] == [depth] * 3
    first = program.instructions["g3"][:depth]
    assert all(isinstance(one, Recv) for one in first), "posted as early as possible"


def test_the_next_receive_is_posted_as_soon_as_one_is_waited_for() -> None:
    instructions = program_of(one_forward_one_backward(4, 8), depth=2).instructions["g3"]
    places = [i for i, one in enumerate(instructions) if isinstance(one, Recv)]
    assert len(places) == 8
    assert all(isinstance(instructions[i - 1], Wait) for i in places[2:])


def test_a_group_is_held_back_while_its_receiver_has_no_room() -> None:
    """Stage 2 takes from 0 what it can use only two rounds later, after stage 1: 0 must not run ahead of it."""
    orders = tuple(tuple(Action(F, stage, m) for m in range(6)) for stage in range(3))
    schedule = Schedule("forward", (0, 1, 2), orders, 6)
    program = program_of(schedule, {**chain(3), (0, 2): 1}, depth=1)
    verify(program)
    assert most_outstanding(program, "g2") == 1


def test_a_schedule_that_needs_more_receives_than_depth_gets_them() -> None:
    orders = (
        (Action(F, 0, 0), Action(F, 0, 1), Action(F, 0, 2)),
        (Action(F, 1, 2), Action(F, 1, 1), Action(F, 1, 0)),
    )
    program = program_of(Schedule("reversed", (0, 1), orders, 3), depth=1)
    verify(program)
    assert most_outstanding(program, "g1") == 3


def test_depth_bounds_the_sends_that_hold_buffers() -> None:
    program = program_of(one_forward_one_backward(4, 8), depth=2)
    held = most = 0
    for one in program.instructions["g0"]:
        held += isinstance(one, Send)
        most = max(most, held)
        held -= isinstance(one, Wait) and one.port.startswith("x")
    assert (most, held) == (2, 0)


def test_what_cannot_be_built_is_refused() -> None:
    schedule = one_forward_one_backward(2, 1)
    groups = groups_of(2)
    tasks, ports = stage_tasks(groups, (0, 1), chain(2))
    with pytest.raises(ProgramError, match=r"runs B0\.0, and stage 0 has no backward task"):
        to_program(schedule, groups, [t for t in tasks if t.name != "B0"], ports)
    with pytest.raises(ProgramError, match=r"runs F0\.0 on g1, and 'F0' is on g0"):
        to_program(schedule, groups[::-1], tasks, ports)
    with pytest.raises(ProgramError, match="depth is 0"):
        to_program(schedule, groups, tasks, ports, depth=0)
    with pytest.raises(ProgramError, match="2 ranks, and 1 groups"):
        to_program(schedule, groups[:1], tasks, ports)


def test_a_schedule_that_waits_for_itself_is_refused_with_what_each_group_waits_for() -> None:
    orders = ((Action(F, 0, 0), Action(B, 0, 0), Action(F, 0, 1), Action(B, 0, 1)),)
    orders += ((Action(F, 1, 0), Action(F, 1, 1), Action(B, 1, 0), Action(B, 1, 1)),)
    with pytest.raises(ProgramError) as error:
        program_of(Schedule("crossed", (0, 1), orders, 2))
    assert "g0 stands at B0.0 and waits for 'dx0-1.0'" in str(error.value)
    assert "g1 stands at F1.1 and waits for 'x0-1.0'" in str(error.value)
