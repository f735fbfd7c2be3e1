"""Verify a Program before it runs: it ends on every backend, and each value is where it is used.

A Program that passes ends whichever of these a communication library does: sends that wait for the receiver
(rendezvous), sends that return at once and hold their buffer, or sends that are copied away. The check of deadlocks
assumes rendezvous, which waits for most: what ends there ends with fewer waits too.
"""

from __future__ import annotations

from collections.abc import Mapping

from hyper_parallel.errors import ProgramError
from hyper_parallel.program.check_channels import channel_defects
from hyper_parallel.program.check_declarations import declaration_defects
from hyper_parallel.program.check_progress import deadlock_defects
from hyper_parallel.program.check_runs import run_defects
from hyper_parallel.program.check_values import value_defects
from hyper_parallel.program.defects import Defect
from hyper_parallel.program.memory import memory_defects
from hyper_parallel.program.program import Program


def find_defects(
    program: Program, *, rendezvous: bool = True, caps: Mapping[str, int] | None = None
) -> tuple[Defect, ...]:
    """Everything that is wrong, or nothing. Each check relies on the ones before it.

    `rendezvous`: sends block until the receive is posted, the default and the stricter. Without it only a send's Wait
    blocks: for asking whether a Program that is refused would run with asynchronous sends. `caps`: bytes by group.
    """
    found = declaration_defects(program)
    if not found:
        found = [*run_defects(program), *value_defects(program), *channel_defects(program)]
    if not found:
        found = [*deadlock_defects(program, rendezvous), *memory_defects(program, caps or {})]
    return tuple(found)


def verify(program: Program, *, caps: Mapping[str, int] | None = None) -> None:
    """Raise ProgramError with every defect of a Program that can block, or whose instructions contradict each other."""
    found = find_defects(program, caps=caps)
    if found:
        shown = [f"- {defect}" for defect in found[:8]]
        more = [f"- and {len(found) - 8} more"] if len(found) > 8 else []
        raise ProgramError("\n".join(["the program cannot run:", *shown, *more]))
