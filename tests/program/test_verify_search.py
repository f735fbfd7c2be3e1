"""The verifier against an exhaustive search of all states, on random Programs of which half are mutated."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.program_oracle import Together, search
from harness.programs import (
    broken_program,
    one_forward_one_backward,
    postpone,
    program_of,
    random_program,
)
from hyper_parallel.layout import Layout, Mesh
from hyper_parallel.program import (
    DefectKind,
    DeviceGroup,
    Port,
    Program,
    Recv,
    Run,
    Send,
    Wait,
    find_defects,
)


def agree(program: Program) -> bool:
    """Whether the verifier and the search say the same, under both kinds of send."""
    for rendezvous in (True, False):
        defects = find_defects(program, rendezvous=rendezvous)
        outcome = search(program, rendezvous)
        if bool(defects) == outcome.right:
            return False
        if defects and defects[0].kind is DefectKind.DEADLOCK and not outcome.stuck:
            return False
    # What ends with sends that block ends with sends that do not.
    return bool(find_defects(program)) or not find_defects(program, rendezvous=False)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_the_verifier_agrees_with_the_search(seed: int, broken: bool) -> None:
    draw = random.Random(seed)
    program = random_program(draw, 3)
    assert agree(broken_program(draw, program) if broken else program)


def test_postponed_transfers_block_some_programs_and_not_others() -> None:
    """The mutation that the benchmark's deadlocks come from: both verdicts occur, and both are right."""
    verdicts = []
    for seed in range(40):
        draw = random.Random(seed)
        program = postpone(draw, random_program(draw, 3))
        assert agree(program), seed
        verdicts.append(tuple(defect.kind for defect in find_defects(program)))
    assert verdicts.count((DefectKind.DEADLOCK,)) > 5
    assert verdicts.count(()) > 5


def by_rank(program: Program) -> Program:
    """The transfers of each rank on its own: every rank a group, every Run a collective of its group's ranks."""
    instructions: dict[str, list[Any]] = {}
    ports: dict[str, Port] = {}
    one = Mesh(("shard", 1))
    for name, group in program.groups.items():
        for rank in group.ranks:
            order: list[Any] = []
            for each in program.instructions[name]:
                if isinstance(each, Run):
                    order.append(Together(tuple(f"r{r}" for r in group.ranks)))
                    continue
                peer = (
                    each.to
                    if isinstance(each, Send)
                    else each.source
                    if isinstance(each, Recv)
                    else each.peer
                )
                for other in program.groups[peer].ranks:
                    here = isinstance(each, Send) or program.ports[each.port].group == name
                    key = f"{each.port}:{rank}-{other}" if here else f"{each.port}:{other}-{rank}"
                    owner = f"r{rank if here else other}"
                    ports[key] = Port(key, Layout.replicated(one, (1,)), "float32", owner)
                    order.append(type(each)(key, each.micro_batch, f"r{other}"))
            instructions[f"r{rank}"] = order
    groups = {name: DeviceGroup(one, (int(name[1:]),), name) for name in instructions}
    return Program(groups, {}, ports, {name: tuple(order) for name, order in instructions.items()}, 1)


def test_groups_stand_for_their_ranks() -> None:
    """Groups of two ranks: the ranks get stuck in some interleaving if and only if the verifier finds a cycle."""
    verdicts = []
    for seed in range(24):
        draw = random.Random(seed)
        program = program_of(one_forward_one_backward(2, 2), ranks=2, depth=draw.randint(1, 2))
        if seed % 3:
            program = postpone(draw, program)
        defects = find_defects(program)
        assert all(defect.kind is DefectKind.DEADLOCK for defect in defects), defects
        outcome = search(by_rank(program))
        assert bool(outcome.stuck) == bool(defects), seed
        verdicts.append(bool(defects))
    assert True in verdicts and False in verdicts


def test_the_search_sees_a_wrong_value() -> None:
    """The oracle itself: two sends in the other order deliver each other's values."""
    program = program_of(one_forward_one_backward(2, 2))
    order = list(program.instructions["g0"])
    first, second = (order.index(Send("x0-1.0", m, "g1")) for m in (0, 1))
    order[first], order[second] = order[second], order[first]
    swapped = replace(program, instructions={**program.instructions, "g0": tuple(order)})
    assert search(program).right
    assert any("channel" in error for error in search(swapped).errors)
    late = [one for one in program.instructions["g1"] if not isinstance(one, Wait)]
    assert search(replace(program, instructions={**program.instructions, "g1": tuple(late)})).errors
