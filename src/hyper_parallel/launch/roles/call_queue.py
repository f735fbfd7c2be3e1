"""The calls of one group: their queue, answers, deadlines, and which failure ended one.

An engine delivers what it hears (`heard`, `ended`), asks what to send (`to_send`), and calls `look` when something was
heard or a time has come (`next_look`). One call is with the workers at a time, so that after a failed instruction no
rank can be in a later list than another, where its collectives would meet those of an earlier one.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hyper_parallel import errors
from hyper_parallel.errors import GroupError, HyperParallelError, LaunchError
from hyper_parallel.launch.roles.protocol import Future, Instruction, WorkerReport, plain
from hyper_parallel.launch.worker_failure import Failure, cause, settles_at

_SHOWN = 4
"""The most workers that an error lists."""
RESTART = "restart the group to go on"


@dataclass(eq=False)
class Call:
    """A list of instructions for each rank, and what has been heard of it."""

    number: int
    operations: Sequence[Sequence[str]]
    """Names of the operations, by rank."""
    lists: Sequence[bytes]
    """What each rank is sent."""
    deadline: float
    timeout_s: float
    what: str
    future: Future
    exact: bool
    """Whether every rank says at once which instruction it begins."""
    answers: dict[int, bytes] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    reports: dict[int, WorkerReport] = field(default_factory=dict)

    def operation(self, rank: int) -> str:
        """The name of the operation that a rank is in."""
        if not self.number:
            return "start"
        names = self.operations[rank]
        place = self.places.get(rank, 0)
        if not self.exact and rank not in self.places:
            return " or ".join(dict.fromkeys(names))
        return names[place] if place < len(names) else "answer"

    def position(self, rank: int) -> str:
        """The operation that a rank is in, its place in the list, and the step."""
        if not self.number:
            return "its start"
        place = self.places.get(rank)
        among = f" ({place + 1} of {len(self.operations[rank])})" if place is not None else ""
        if self.exact and place is None:
            among = " (not begun)"
        return f"{self.operation(rank)}{among}" + (f", {self.what}" if self.what else "")


def sent_lists(name: str, size: int, lists: Sequence[Sequence[Instruction]]) -> list[bytes]:
    """The lists of a call as they are sent to each rank. Raises LaunchError for a wrong number of lists."""
    if len(lists) != size:
        raise LaunchError(
            f"group {name!r} has {size} workers, and {len(lists)} lists of instructions were given; give one for each"
        )
    packed_lists: dict[int, bytes] = {}  # ranks that get the same list share its bytes
    for given in lists:
        if id(given) not in packed_lists:
            packed_lists[id(given)] = plain([(one.operation, dict(one.arguments)) for one in given])
    return [packed_lists[id(given)] for given in lists]


class CallQueue:
    """Not safe for threads: the engine's lock guards it."""

    def __init__(
        self,
        name: str,
        size: int,
        log: Callable[[int], Path],
        situation: Callable[[int], str] = lambda rank: "",
        exact: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`situation`: what else is known of a rank that does not answer, for messages; may be empty. `exact`: whether
        every rank says at once which instruction it begins; else it is known now and then.
        """
        self._exact = exact
        self._clock = clock
        self.name, self.size = name, size
        self._log, self._situation = log, situation
        self.broken: str | None = "it was not started"
        self._next = 1
        self._queue: deque[Call] = deque()
        self._current: Call | None = None
        self._sent = False
        self._ended: dict[int, Failure] = {}

    @property
    def busy(self) -> bool:
        """Whether the workers have a call."""
        return self._current is not None and self._sent

    def begin(self, timeout_s: float) -> Future:
        """New workers start; the future ends when all host objects are there. Their messages have call number 0."""
        now = self._clock()
        future = Future(f"the start of group {self.name!r}", now + timeout_s)
        self._current = Call(0, [()] * self.size, [], now + timeout_s, timeout_s, "", future, self._exact)
        self._sent, self._ended, self.broken = True, {}, None
        return future

    def submit(
        self, lists: Sequence[Sequence[Instruction]], sent: Sequence[bytes], timeout_s: float, what: str
    ) -> Future:
        """Queue a call; `sent`: the lists as they are sent."""
        now = self._clock()
        operations = [[one.operation for one in given] for given in lists]
        names = ", ".join(dict.fromkeys(name for given in operations for name in given))
        described = f"{self.name}: {names or 'nothing'}" + (f", {what}" if what else "")
        future = Future(described, now + timeout_s)
        if self.broken is not None:
            future.finish(self._refused(described))
        else:
            self._queue.append(
                Call(self._next, operations, sent, now + timeout_s, timeout_s, what, future, self._exact)
            )
            self._next += 1
        return future

    def to_send(self) -> Call | None:
        """The call that the workers should be sent now, once."""
        if self._current is None and self._queue and self.broken is None:
            self._current, self._sent = self._queue.popleft(), False
        if self._current is None or self._sent:
            return None
        self._sent = True
        return self._current

    def heard(self, rank: int, message: tuple[Any, ...]) -> None:
        """A message of a worker. One of a call that has ended is ignored."""
        kind, number = message[0], message[1]
        call = self._current
        if call is None or number != call.number:
            return
        if kind == "at":
            call.places[rank] = message[2]
        elif kind == "done":
            call.answers[rank] = message[2]
        elif kind == "failed":
            call.places[rank] = message[2]
            report: WorkerReport = message[3]
            if not self._exact:  # it may come from another machine, with another clock
                report = replace(report, failure=replace(report.failure, time=self._clock()))
            call.reports[rank] = report

    def ended(self, rank: int, failure: Failure) -> None:
        """A worker has ended."""
        self._ended.setdefault(rank, failure)

    def postpone(self, seconds: float) -> None:
        """This process did not run for that long: nothing was heard, and no deadline is over because of it."""
        for call in (*self._queue, *([self._current] if self._current is not None else [])):
            call.deadline += seconds

    def next_look(self) -> float:
        """When to `look` if nothing is heard, on the monotonic clock."""
        call = self._current
        times = [one.deadline for one in self._queue]
        if call is not None:
            times.append(call.deadline)
            if failures := self._failures(call):
                times.append(settles_at(failures))
        return min(times, default=float("inf"))

    def look(self) -> bool:
        """End the call whose time has come; whether the workers must be killed."""
        now = self._clock()
        for late in [one for one in self._queue if now >= one.deadline]:
            self._queue.remove(late)
            late.future.finish(self._never_begun(late))
        call = self._current
        if call is None:
            return self._ended_idle()
        failures = self._failures(call)
        heard = call.answers.keys() | call.reports.keys() | self._ended.keys()
        complete = len(heard) == self.size
        if failures:
            began = cause(failures)
            assert began is not None
            settled = now >= min(settles_at(failures), call.deadline)
            if complete or settled or began.kind == "died":
                return self._fail(call, began, usable=complete and not self._ended)
        elif complete:
            self._current = None
            call.future.finish(self._results(call))
        elif now >= call.deadline:
            return self._break(call, self._late(call, sorted(set(range(self.size)) - heard)))
        return False

    def stop(self, why: str) -> None:
        """The workers are killed by request, or can no longer be reached: all open calls fail."""
        self.broken = why
        for call in (*([self._current] if self._current is not None else []), *self._queue):
            call.future.finish(self._refused(call.future.described))
        self._current = None
        self._queue.clear()

    def _results(self, call: Call) -> list[Any] | GroupError:
        try:
            return [pickle.loads(call.answers[rank]) for rank in range(self.size)]
        except Exception as error:
            return GroupError(
                f"{call.future.described}: the answer cannot be read here: {type(error).__name__}: {error}; return "
                "plain data",
                self.name,
            )

    def _failures(self, call: Call) -> list[Failure]:
        found = {rank: report.failure for rank, report in call.reports.items()}
        return list({**self._ended, **found}.values())

    def _ended_idle(self) -> bool:
        if not self._ended or self.broken is not None:
            return False
        began = cause(list(self._ended.values()))
        assert began is not None
        self.stop(
            f"its worker {began.rank} {_how(began)} between two calls; its log: {self._log(began.rank)}"
        )
        return True

    def _fail(self, call: Call, began: Failure, usable: bool) -> bool:
        rank = began.rank
        position = call.position(rank)
        report = call.reports.get(rank)
        error: HyperParallelError
        if began.kind in ("error", "fault"):
            # Without a report it failed before it had a host object.
            kind = getattr(errors, report.error_class) if report is not None else LaunchError
            error = kind(f"{self.name} {rank}, {position}: {began.text}")
        else:
            text = f"{self.name} {rank} {_how(began)} in {position}; its log: {self._log(rank)}"
            error = GroupError(text, self.name, (rank,), call.operation(rank))
        if usable and began.kind == "error" and call.number:
            # Every rank has left the list: the group waits for the next one. Later calls may build on this one.
            self._current = None
            call.future.finish(error)
            for later in self._queue:
                later.future.finish(
                    GroupError(
                        f"{later.future.described}: not begun, since the call before it failed: {error}"
                    )
                )
            self._queue.clear()
            return False
        return self._break(call, error)

    def _break(self, call: Call, error: HyperParallelError) -> bool:
        call.future.finish(error)
        self.stop(str(error))
        return True

    def _late(self, call: Call, silent: list[int]) -> GroupError:
        notes = {rank: self._situation(rank) for rank in silent}
        # The one that is stopped is the reason why others wait.
        silent.sort(key=lambda rank: "suspended" not in notes[rank])
        each = "; ".join(
            f"{self.name} {rank} in {call.position(rank)}" + (f", {notes[rank]}" if notes[rank] else "")
            for rank in silent[:_SHOWN]
        ) + (f"; and {len(silent) - _SHOWN} others" if len(silent) > _SHOWN else "")
        text = (
            f"no answer within {call.timeout_s:g} s from {each}; {RESTART}; "
            f"{'its log' if len(silent) == 1 else 'the first log'}: {self._log(silent[0])}"
        )
        return GroupError(text, self.name, tuple(silent), call.operation(silent[0]))

    def _never_begun(self, call: Call) -> GroupError:
        held = f" behind {self._current.future.described!r}" if self._current is not None else ""
        return GroupError(
            f"{call.future.described}: not begun within {call.timeout_s:g} s{held}; give it more time, or call less at "
            "once",
            self.name,
        )

    def _refused(self, described: str) -> GroupError:
        return GroupError(
            f"{described}: group {self.name!r} has no workers: {self.broken}; {RESTART}", self.name
        )


def _how(failure: Failure) -> str:
    """A failure after the name of its rank."""
    if failure.kind == "died":
        return failure.text
    if failure.kind == "lost":
        return f"lost the other workers, and none says why ({failure.text})"
    return f"failed with {failure.text.splitlines()[-1]}"
