"""Verified Programs end on gloo, with the right values; a refused one hangs there."""

from __future__ import annotations

import random

from harness.program_gloo import GlooGroups, run_on_gloo
from harness.programs import one_forward_one_backward, postpone, program_of, random_program
from hyper_parallel.program import DefectKind, find_defects


def test_accepted_programs_end_with_both_kinds_of_send() -> None:
    groups = {size: GlooGroups(size, 60.0) for size in (2, 3, 4)}
    for seed in range(30):
        draw = random.Random(seed)
        program = postpone(draw, random_program(draw)) if seed % 2 else random_program(draw)
        if find_defects(program):
            continue
        for rendezvous in (True, False):
            assert run_on_gloo(program, groups[len(program.instructions)], rendezvous) == [], seed


def test_a_refused_program_hangs() -> None:
    draw = random.Random(0)
    program = program_of(one_forward_one_backward(3, 3))
    while not find_defects(program):
        program = postpone(draw, program)
    assert [defect.kind for defect in find_defects(program)] == [DefectKind.DEADLOCK]
    errors = run_on_gloo(program, GlooGroups(3, 0.3))
    assert any("Timed out" in error for error in errors), errors
