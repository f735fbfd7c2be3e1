"""What a worker wrote to the board is there after its end, and a heartbeat says the same."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass

from hyper_parallel.launch.heartbeat import PositionBoard, Pulse


@dataclass(frozen=True)
class Place:
    text: str
    waits: bool = False


PLACES = (
    Place("stage 1, micro-batch 0, Run(forward 1)"),
    Place("stage 1, micro-batch 0, Wait(x)", waits=True),
)


def test_a_killed_process_leaves_its_step_and_instruction() -> None:
    board = PositionBoard.create(3)
    child = os.fork()
    if child == 0:
        pulse = Pulse()
        pulse.write_to(PositionBoard(board.descriptor).slot(1))
        with pulse.step(7), pulse.schedule(PLACES):
            pulse.instruction(0)
            pulse.instruction(1)
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [board.read(slot) for slot in range(3)] == [(0, ""), (7, PLACES[1].text), (0, "")]
    board.close()


def test_between_schedules_there_is_no_instruction_and_an_operation_is_named() -> None:
    board, pulse = PositionBoard.create(1), Pulse()
    pulse.write_to(board.slot(0))
    with pulse.step(2), pulse.schedule(PLACES):
        pulse.instruction(0)
    assert board.read(0) == (2, "") and pulse.beat().instruction == "" and pulse.position() == ""
    with pulse.operation("evaluating"), pulse.schedule((Place("stage 0, " + "x" * 300),)):
        pulse.instruction(0)
        step, text = board.read(0)
        assert step == 2 and text.startswith("evaluating, stage 0, x") and len(text) == 248
    board.close()


def test_a_failed_schedule_keeps_its_position() -> None:
    board, pulse = PositionBoard.create(1), Pulse()
    pulse.write_to(board.slot(0))
    with contextlib.suppress(ValueError), pulse.step(3), pulse.schedule(PLACES):
        pulse.instruction(1)
        raise ValueError("defect")
    assert board.read(0) == (3, PLACES[1].text) and pulse.position() == PLACES[1].text
    board.close()


def test_instructions_are_progress_and_one_that_waits_has_no_line() -> None:
    pulse = Pulse()
    with pulse.step(1), pulse.schedule(PLACES):
        pulse.instruction(0)
        first = pulse.beat()
        pulse.instruction(1)
        second = pulse.beat()
        assert second.progress > first.progress and not second.waits
        third = pulse.beat()
        assert third.progress == second.progress
        assert (third.instruction, third.waits, third.where) == (PLACES[1].text, True, "")
