"""Programs with pairs of tasks: built without deadlock, verified, and run on gloo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from harness.program_gloo import GlooGroups, run_on_gloo
from harness.programs import program_of
from hyper_parallel.errors import ProgramError
from hyper_parallel.program import (
    DefectKind,
    Instruction,
    Program,
    Run,
    RunPair,
    find_defects,
    runs_of,
)
from hyper_parallel.schedule import Costs, Schedule, ScheduleName, named_schedule, with_pairs

PAIRED = ["1f1b", "1f1b-split", "interleaved-1f1b", "zb-h2", "zb-v", "dualpipev"]


def _paired(name: str, ranks: int, count: int) -> Schedule:
    schedule = named_schedule(name, ranks, count, paired=True)
    stages = schedule.stages
    return with_pairs(schedule, replace(Costs.even(stages), hidden=((0.5,) * stages,) * stages))


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", list(ScheduleName))
def test_programs_with_pairs_are_verified_and_run_the_schedules_actions(
    name: str, ranks: int, depth: int
) -> None:
    schedule = _paired(name, ranks, 4 * ranks)
    program = program_of(schedule, depth=depth)
    assert not find_defects(program) and not find_defects(program, rendezvous=False)
    for rank, order in enumerate(schedule.orders):
        instructions = program.instructions[f"g{rank}"]
        assert sum(isinstance(one, RunPair) for one in instructions) == len(schedule.pairs_of(rank))
        ran = [(run.task, run.micro_batch) for one in instructions for run in runs_of(one)]
        assert sorted(ran) == sorted((str(a).split(".")[0], a.micro_batch) for a in order)


def test_programs_with_pairs_end_on_gloo() -> None:
    groups = GlooGroups(3, 60.0)
    for name in PAIRED:
        program = program_of(_paired(name, 3, 12))
        assert any(isinstance(one, RunPair) for one in program.instructions["g0"]), name
        for rendezvous in (True, False):
            assert run_on_gloo(program, groups, rendezvous) == [], name


def test_a_pair_that_waits_for_itself_over_another_group_cannot_be_built() -> None:
    schedule = named_schedule("gpipe", 2, 2)
    with pytest.raises(ProgramError, match=r"g0 stands at F0\.1 with B0\.0 and waits for 'dx0-1\.0'"):
        program_of(replace(schedule, pairs=((1,), ())))


def _changed(change: Callable[[RunPair], Instruction]) -> Program:
    program = program_of(_paired("1f1b", 2, 8))
    found = list(program.instructions["g1"])
    at = next(at for at, one in enumerate(found) if isinstance(one, RunPair))
    pair = found[at]
    assert isinstance(pair, RunPair)
    found[at] = change(pair)
    return replace(program, instructions={**program.instructions, "g1": tuple(found)})


@pytest.mark.parametrize(
    ("change", "kind", "told"),
    [
        (lambda pair: RunPair(pair.backward, pair.forward), DefectKind.DECLARATION,
         "runs a backward task as the forward task of a pair"),
        (lambda pair: replace(pair, backward=replace(pair.backward, micro_batch=pair.forward.micro_batch)),
         DefectKind.DECLARATION, "pairs two tasks of one micro-batch, of which the second needs the first"),
        (lambda pair: replace(pair, backward=Run("B9", 0)), DefectKind.DECLARATION,
         "names a task that the program does not have"),
        (lambda pair: replace(pair, forward=replace(pair.forward, micro_batch=7)), DefectKind.VALUE,
         "which has not been received"),
        (lambda pair: pair.forward, DefectKind.RUNS, "no backward task for micro-batch 0"),
    ],
)  # fmt: skip
def test_a_broken_pair_is_a_defect(
    change: Callable[[RunPair], Instruction], kind: DefectKind, told: str
) -> None:
    found = find_defects(_changed(change))
    assert any(defect.kind is kind and told in defect.text for defect in found), found


def test_a_pair_waits_for_the_values_of_both() -> None:
    program = program_of(_paired("1f1b", 2, 8))
    texts = [str(one) for one in program.instructions["g0"]]
    at = next(at for at, text in enumerate(texts) if text.startswith("RunPair"))
    assert texts[at] == "RunPair(F0, micro-batch 3; B0, micro-batch 0)"
    assert any("dx0-1.0, micro-batch 0" in text for text in texts[:at] if text.startswith("Wait"))
    assert next(text for text in texts[at:] if text.startswith("Send")) == (
        "Send(x0-1.0, micro-batch 3) to g1"
    )
