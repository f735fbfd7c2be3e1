"""One Program for a step whose micro-batches are of several kinds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.step_programs import chain_kind
from hyper_parallel.errors import ProgramError, StrategyError
from hyper_parallel.layout import DeviceGroup, Mesh
from hyper_parallel.program import Program, Recv, Run, Send, verify
from hyper_parallel.runtime.build_program import step_program
from hyper_parallel.schedule import Costs, MicroBatchKind, Schedule, step_schedule

GROUPS = [DeviceGroup(Mesh(("tensor_x", 1)), (place,), name) for place, name in enumerate("abc")]


def _made() -> tuple[Program, Schedule]:
    """Two micro-batches of one kind on all groups, three of another one without the first group."""
    kinds = [chain_kind(1, GROUPS, [0, 1, 2], 2), chain_kind(2, GROUPS, [1, 2], 3)]
    priced = [MicroBatchKind.chain(Costs.even(len(one.placement)), one.placement, one.count) for one in kinds]
    found = step_schedule(priced, len(GROUPS)).schedule
    return step_program(kinds, found, GROUPS)[0], found


def test_each_micro_batch_runs_the_stages_of_its_kind() -> None:
    program, schedule = _made()
    runs = {
        group: [(program.tasks[one.task].stage, one.micro_batch) for one in order if isinstance(one, Run)]
        for group, order in program.instructions.items()
    }
    assert {m for _, m in runs["a"]} == {0, 1}
    assert {m for _, m in runs["b"]} == {m for _, m in runs["c"]} == {0, 1, 2, 3, 4}
    assert all(program.tasks[f"forward {stage}"].micro_batches == (0, 1) for stage in range(3))
    assert all((stage < 3) == (m < 2) for order in runs.values() for stage, m in order)
    assert schedule.placement == (0, 1, 2, 1, 2)


def test_values_of_each_kind_have_ports_of_their_own() -> None:
    program, _ = _made()
    sizes = {name: port.layout.shape for name, port in program.ports.items()}
    assert sizes == {
        "forward.0.0-1.1": (1,),
        "forward.0.1-2.1": (1,),
        "backward.0.1-0.1": (1,),
        "backward.0.2-1.1": (1,),
        "forward.0.0-1.2": (2,),
        "backward.0.1-0.2": (2,),
    }
    carried = [
        one for order in program.instructions.values() for one in order if isinstance(one, Send | Recv)
    ]
    assert len(carried) == 2 * (2 * 4 + 3 * 2)
    assert all(one.port.endswith(".1") == (one.micro_batch in (0, 1)) for one in carried)


def test_a_task_for_a_micro_batch_of_another_kind_is_a_defect() -> None:
    program, _ = _made()
    order = program.instructions["c"]
    other = tuple(replace(one, micro_batch=4) if one == Run("backward 2", 1) else one for one in order)
    with pytest.raises(ProgramError, match="for a micro-batch of another kind"):
        verify(replace(program, instructions={**program.instructions, "c": other}))


def test_a_schedule_of_other_stages_is_refused() -> None:
    kinds = [chain_kind(1, GROUPS, [0, 1, 2], 2)]
    two = step_schedule([MicroBatchKind.chain(Costs.even(2), (0, 1), 2)], 3).schedule
    with pytest.raises(StrategyError, match="has 2 stages, and the model was cut into 3"):
        step_program(kinds, two, GROUPS)
    with pytest.raises(StrategyError, match="has 2 stages, and the model was cut into 3"):
        step_program([replace(kinds[0], placement=two.placement)], two, GROUPS)
