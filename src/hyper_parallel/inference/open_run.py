"""A run of the engine whose requests come while others are answered, a pass at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection

from hyper_parallel.inference.request import Completion, Request
from hyper_parallel.inference.running import Running
from hyper_parallel.inference.scheduler import Scheduler


class OpenRun:
    """Made by `Engine.open_run`. Not for several threads at once."""

    def __init__(self, scheduler: Scheduler, advance: Callable[[int], list[Running]]) -> None:
        """`advance` computes as many passes as it is given, and gives the requests that ended."""
        self._scheduler, self._advance = scheduler, advance

    def __len__(self) -> int:
        """Requests without a whole answer."""
        return len(self._scheduler.waiting) + len(self._scheduler.running)

    def submit(self, number: int, request: Request) -> None:
        """Add a request, no longer than those for which memory was taken; `number` is its own in this run."""
        self._scheduler.waiting.append((number, request))

    def advance(self, passes: int) -> list[tuple[int, Completion]]:
        """Compute `passes` passes, fewer where no request is left; the number and answer of each that ended."""
        return [(one.number, one.answer) for one in self._advance(passes)]

    def cancel(self, numbers: Collection[int]) -> None:
        """Give up some requests; the others go on."""
        self._scheduler.cancel(numbers)

    def withdraw(self) -> list[tuple[int, Request, list[int]]]:
        """Give up all unfinished requests, which ends the run: the number of each, its request and the tokens of its
        answer until now."""
        found = [(one.number, one.request, list(one.answer.tokens)) for one in self._scheduler.running]
        found += [
            (number, one, list(one.ids[len(one.ids) - one.answered :]))
            for number, one in self._scheduler.waiting
        ]
        self._scheduler.stop()
        return found
