"""A campaign against the verifier of Programs: random ones, half of them broken, judged by it, by a search and on gloo.

Random Programs (2 to 4 groups, 1 to 3 micro-batches, virtual stages, skip connections, split backward passes),
half of them broken: receives posted late and sends held back, or instructions dropped, doubled, moved and
swapped, until the exhaustive search of all states (`program_oracle`) says that the Program is broken.

- **Accepted**: each runs to its end on gloo with the right values, with sends that wait for the receiver and with
  asynchronous ones, and the search finds no state in which it stops.
- **Rejected**: the search confirms each, by a state in which the groups are stuck or by an error of values or counts.
  A sample of those that only block runs on gloo until its time-out.

Mutants that turn out to be right are judged, and run, too.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from harness.program_gloo import GlooGroups, run_on_gloo
from harness.program_oracle import search
from harness.programs import broken_program, random_program
from hyper_parallel.program import DefectKind, Program, find_defects

TIMEOUT_S = 30.0
HANG_TIMEOUT_S = 1.0
MOST_MUTANTS = 40


class Campaign:
    """Counts of what happened, and the Programs that were judged wrongly."""

    def __init__(self, hangs: int) -> None:
        self.counts: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.hangs = hangs
        self.groups: dict[int, GlooGroups] = {}

    def judge(self, name: str, program: Program) -> bool:
        """Verify one Program and hold the verdict against the search and gloo. True if it is broken."""
        defects = find_defects(program)
        outcome = search(program)
        if bool(defects) == outcome.right:
            self.wrong.append(f"{name}: the verifier says {defects[:1]}, the search {outcome}")
        if not defects:
            self.counts["accepted"] += 1
            self._run(name, program)
            return False
        self.counts["rejected"] += 1
        self.kinds[defects[0].kind.value] += 1
        self.counts["confirmed by a stuck state"] += bool(outcome.stuck)
        self.counts["confirmed by an error of values or counts alone"] += not outcome.stuck
        if defects[0].kind is DefectKind.DEADLOCK and self.counts["deadlocks run on gloo"] < self.hangs:
            self.counts["deadlocks run on gloo"] += 1
            self.counts["deadlocks that hung on gloo"] += bool(
                run_on_gloo(program, GlooGroups(len(program.instructions), HANG_TIMEOUT_S))
            )
        return True

    def _run(self, name: str, program: Program) -> None:
        size = len(program.instructions)
        for rendezvous in (True, False):
            groups = self.groups.get(size) or GlooGroups(size, TIMEOUT_S)
            errors = run_on_gloo(program, groups, rendezvous)
            self.counts["runs on gloo"] += 1
            self.counts["runs on gloo that ended"] += not errors
            self.groups.pop(size, None)
            if errors:
                self.wrong.append(f"{name}: accepted, and on gloo: {errors}")
            else:
                self.groups[size] = groups


def campaign(programs: int, seed: int, hangs: int) -> dict[str, Any]:
    """Judge `programs` random Programs, every second one broken."""
    state = Campaign(hangs)
    for index in range(programs):
        draw = random.Random(f"{seed}.{index}")
        program = random_program(draw)
        if index % 2 == 0:
            if state.judge(f"{seed}.{index}", program):
                state.wrong.append(f"{seed}.{index}: a built Program was refused")
            continue
        for attempt in range(MOST_MUTANTS):
            if state.judge(f"{seed}.{index}, mutant {attempt}", broken_program(draw, program)):
                break
            state.counts["mutants that were right"] += 1
    return {
        "counts": dict(state.counts),
        "first_defect": dict(state.kinds),
        "judged_wrongly": state.wrong,
    }
