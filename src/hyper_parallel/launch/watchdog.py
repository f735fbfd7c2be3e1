"""Watchdog: names the rank that stopped first, from all heartbeats.

Time counts only while the watchdog runs and hears other ranks, so that a run that is suspended as a whole, with its
machine or by Ctrl-Z, does not count as a hang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hyper_parallel.launch.heartbeat import BEAT_S, Beat
from hyper_parallel.units import format_seconds

LEAST_S = 60.0
"""The shortest default limit."""
STEPS = 20
"""The default limit, in median steps."""
UNMEASURED_S = 600.0
"""The limit before the first step time is known."""
PATIENT_S = 3600.0
"""Limit for all ranks without progress in a `patient` operation, with idle processors."""
HEARD_S = 5.0
"""A rank whose last heartbeat is older is silent."""
LATE = 3
"""Minimum number of heartbeats that may be missing."""
_TICK_S = 1.0
"""The most that one check counts: a longer gap means that the watchdog itself was suspended."""
_SHOWN = 3
"""Number of other ranks whose positions a message has."""
_BUSY = 0.25
"""The ratio of processor time to time above which a process counts as computing."""

Activity = Literal["stopped", "idle", "busy"]


@dataclass(frozen=True)
class Suspect:
    """The rank that stopped first, and how."""

    rank: int
    how: str


class Watchdog:
    """Watches `ranks`, whose heartbeats come every `interval` seconds, with `launch.timeout` for `timeout`.

    `others`: there are ranks that this watchdog does not hear. `hangs`: it also reports ranks that are heard but make
    no progress. `board`: the step and the instruction of a schedule that a rank is in now (`PositionBoard.read`);
    without it the last heartbeat says.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        timeout: float | None,
        *,
        others: bool = False,
        hangs: bool = True,
        interval: float = BEAT_S,
        board: Callable[[int], tuple[int, str]] | None = None,
    ) -> None:
        self._timeout, self._others, self._hangs, self._interval = timeout, others, hangs, interval
        self._board = board
        self._beats: dict[int, Beat] = {rank: Beat() for rank in ranks}
        self._age = dict.fromkeys(self._beats, 0.0)  # since the last heartbeat, in time that was watched
        self._busy = dict.fromkeys(
            self._beats, 0.0
        )  # the part of it in which the process was seen to compute
        self._stood = dict.fromkeys(self._beats, 0.0)  # since its progress was last seen to change
        self._still = 0.0  # since any rank got on
        self._last: float | None = None

    def forget(self, rank: int) -> None:
        """A rank has ended."""
        for known in (self._beats, self._age, self._busy, self._stood):
            known.pop(rank, None)
        self._still = 0.0

    def hear(self, rank: int, beat: Beat) -> None:
        """A heartbeat came."""
        if rank not in self._beats:
            return
        before = self._beats[rank]
        # Outside of steps nobody knows how long a computation takes; in one, a rank may wait with a busy processor.
        unlimited = beat.patient or beat.step == 0
        computes = unlimited and beat.cpu - before.cpu > _BUSY * max(self._age[rank], _TICK_S)
        if beat.progress != before.progress or computes:
            self._still = self._stood[rank] = 0.0
        self._beats[rank] = beat
        self._age[rank] = self._busy[rank] = 0.0

    def position(self, rank: int) -> str:
        """A rank's position at its last heartbeat; in a schedule the present one, where there is a board."""
        beat = self._beats[rank]
        step, instruction = self._instruction(rank)
        operation = (
            "" if beat.operation == "step" or (instruction and self._board is not None) else beat.operation
        )
        words = [f"in step {step}" if step else "before the first step", operation, instruction]
        return ", ".join(filter(None, [*words, f"in {beat.where}" if beat.where else ""]))

    def _instruction(self, rank: int) -> tuple[int, str]:
        """The step, and what a rank is at in a schedule, on the board with its operation; empty outside of one."""
        beat = self._beats[rank]
        if self._board is None:
            return beat.step, beat.instruction
        step, instruction = self._board(rank)
        return (step, instruction) if instruction else (max(step, beat.step), "")

    def scheduled(self, rank: int) -> bool:
        """Whether a rank is in a schedule of instructions, or died in one."""
        return bool(self._instruction(rank)[1])

    def others_in_schedule(self, rank: int) -> str:
        """The instructions of the other ranks that are in a schedule, for an error about `rank`; empty where none
        is."""
        found = [other for other in self._beats if other != rank and self.scheduled(other)]
        words = [f"worker {other} is {self.position(other)}" for other in found[:_SHOWN]]
        if len(found) > _SHOWN:
            words.append(f"{len(found) - _SHOWN} more are in the schedule too")
        return "; ".join(words)

    def look(self, now: float, activity: Callable[[int], Activity] = lambda rank: "idle") -> Suspect | None:
        """The rank that stopped first, once it exceeds its limit. `activity` returns what a silent rank's process does.
        Called several times a second.
        """
        passed = min(now - self._last, _TICK_S) if self._last is not None else 0.0
        self._last = now
        for rank in self._age:
            self._age[rank] += passed
            self._stood[rank] += passed
        heard = max(min(HEARD_S, self._limit() / 2), LATE * self._interval)
        silent = [rank for rank, age in self._age.items() if age > heard]
        if not silent:
            self._still += passed
            return self._hanging() if self._hangs else None
        if len(silent) == len(self._age) and not self._others:
            for rank in silent:
                self._age[rank] -= passed  # nobody is heard: the run is suspended
            return None
        for rank in silent:
            does = activity(rank)
            if does == "busy":
                self._busy[rank] += passed
            if self._age[rank] - self._busy[rank] > self._silence_limit(rank, does):
                first = max(silent, key=lambda one: self._age[one])
                how = (
                    "its process is stopped (SIGSTOP, a debugger)"
                    if activity(first) == "stopped"
                    else "it is frozen"
                )
                return self._suspect(
                    first,
                    f"has given no sign of life for {format_seconds(self._age[first])}: {how}; it was last heard "
                    f"{self.position(first)}",
                )
        return None

    def _suspect(self, rank: int, how: str) -> Suspect:
        return Suspect(rank, "; ".join(filter(None, (how, self.others_in_schedule(rank)))))

    def _hanging(self) -> Suspect | None:
        patient = any(beat.patient for beat in self._beats.values())
        limit = max(PATIENT_S, self._timeout or 0.0) if patient else self._limit()
        if self._still <= limit or not self._beats:
            return None
        first = min(self._beats, key=lambda rank: (self._behind(rank), rank))
        alike = len({self._behind(rank) for rank in self._beats}) == 1
        waited = format_seconds(self._still)
        if all(self._beats[rank].waits for rank in self._beats) and self.scheduled(first):
            return self._suspect(
                first,
                f"stopped first, and every other one here stands still too, for {waited}: each waits for another one, "
                f"so that a message was lost or a link is stuck; it is {self.position(first)}",
            )
        if alike and (len(self._beats) > 1 or self._others):
            return Suspect(
                first,
                f"and every other one here have stood still for {waited}: a device, a link or a worker on another "
                f"machine is stuck; they are {self.position(first)}",
            )
        return self._suspect(
            first,
            f"has stood still for {waited} while the others wait for it; it is {self.position(first)}",
        )

    def _behind(self, rank: int) -> tuple[float, ...]:
        """Sorts the rank that the others wait for first."""
        beat = self._beats[rank]
        if any(one.instruction for one in self._beats.values()):
            # Stages begin other collectives, and as many as they have layers: who does not wait is waited for; of
            # those that all wait, a rank that has ended its schedule waits for one that has not.
            return beat.step, beat.waits, not beat.instruction, -self._stood[rank]
        return beat.step, beat.collectives, beat.waits

    def _limit(self) -> float:
        if self._timeout is not None:
            return self._timeout
        times = [beat.step_time for beat in self._beats.values() if beat.step_time is not None]
        return max(LEAST_S, STEPS * max(times)) if times else UNMEASURED_S

    def _silence_limit(self, rank: int, does: Activity) -> float:
        # A computing process sends heartbeats, unless a library holds the interpreter; a stopped one cannot.
        if self._timeout is not None:
            return self._timeout
        return LEAST_S if does == "stopped" or not self._beats[rank].patient else UNMEASURED_S


class Activities:
    """The activity of this machine's processes, from /proc; `idle` without /proc."""

    def __init__(self, pids: dict[int, int]) -> None:
        """`pids`: by rank."""
        self._pids = pids
        self._used: dict[int, int] = {}

    def __call__(self, rank: int) -> Activity:
        try:
            fields = Path(f"/proc/{self._pids[rank]}/stat").read_text().rpartition(")")[2].split()
        except (OSError, KeyError):
            return "idle"
        used = int(fields[11]) + int(fields[12])  # proc(5): utime, stime
        before = self._used.get(rank)
        self._used[rank] = used
        if fields[0] in "Tt":
            return "stopped"
        return "busy" if fields[0] == "R" or before is None or used != before else "idle"
