"""Campaigns: cases that are drawn from seeds or listed, run each by itself, judged, counted and kept.

A case ends as right, refused (with the reason) or wrong, whatever a script calls these. `Rows` is a result that grows
case by case: what a stopped campaign has found stays, and the next one does what is left.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

from pages import Benchmark

Case = TypeVar("Case")
Result = TypeVar("Result")


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the main thread after so many seconds."""

    def end(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def in_processes(
    run: Callable[[Case], Result],
    cases: Iterable[Case],
    workers: int,
    per_process: int = 20,
    begin: Callable[[], None] | None = None,
) -> Iterator[tuple[Case, Result]]:
    """(case, result) of each as they end, `workers` at a time; processes are replaced after `per_process` cases, which
    fill them. Each calls `begin` first."""
    context = multiprocessing.get_context("spawn")
    left = iter(cases)
    # Not max_tasks_per_child, with which an executor of Python 3.11 stops for ever (python/cpython issue 115634).
    while part := list(itertools.islice(left, per_process * workers)):
        with ProcessPoolExecutor(workers, mp_context=context, initializer=begin) as pool:
            asked = {pool.submit(run, case): case for case in part}
            try:
                for future in as_completed(asked):
                    yield asked[future], future.result()
            finally:  # also where the caller has enough
                pool.shutdown(cancel_futures=True)


def one_line(error: object, most: int = 250) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split())[:most]


def general(reason: str) -> str:
    """A refusal without its numbers and names, to be counted with others like it."""
    return re.sub(r"\d+", "N", re.sub(r"'[^']*'", "'…'", reason))[:170]


def counted(cases: Iterable[Mapping[str, Any]], *keys: str) -> dict[str, int]:
    """How many cases there are of each kind: the values of `keys`, joined by commas."""
    return dict(sorted(Counter(", ".join(str(case[key]) for key in keys) for case in cases).items()))


class Rows:
    """The rows of a result by name, written after each one."""

    def __init__(
        self,
        benchmark: Benchmark,
        again: bool = False,
        summary: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda rows: {},
    ) -> None:
        """`again`: forget the rows that are kept. `summary`: what else the result has, of all rows."""
        self._benchmark, self._summary = benchmark, summary
        self._key = benchmark.key or "cases"
        self.rows: dict[str, Any] = {} if again else benchmark.kept().get(self._key, {})

    def missing(self, names: Iterable[str], only: str = "", again: bool = False) -> Iterator[str]:
        """The names with the text `only` that have no row yet."""
        return (name for name in names if only in name and (again or name not in self.rows))

    def add(self, name: str, row: Any) -> None:
        """Keep a row."""
        self.rows[name] = row
        self.write()

    def write(self) -> None:
        """Write the result, and the pages that show it."""
        self._benchmark.keep({**self._summary(self.rows), self._key: self.rows})
