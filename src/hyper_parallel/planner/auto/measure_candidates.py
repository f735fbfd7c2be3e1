"""Measures strategies of similar predicted speed with real steps, each in processes beside the run's own workers.

A prediction is off by some percent, and neighbours often differ by less. So the best few are built as `train` would
build them, stepped on the run's first batch, alternately where memory allows, and let go; the run then begins from its
seed with the quickest, as if it had been written. Under a memory budget each is planned within the budget.

Every rank comes to the same: after each answer of a trial the workers tell one another whether theirs failed. One that
fails on some rank is left on all of them, and so is one that is not over when the time is (`Clock`).
"""

from __future__ import annotations

import gc
import secrets
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from hyper_parallel.compat.process_groups import address, broadcast_text, is_left, leave_word, word_left
from hyper_parallel.config import RunConfig
from hyper_parallel.launch import Worker
from hyper_parallel.launch.heartbeat import pulse
from hyper_parallel.planner.auto.trial_process import Answer, Place, Trial

LEAST, MOST = 4, 20
"""Steps that are timed: as many as go into `SECONDS`, within these."""
SECONDS = 4.0
SLOW = 1.5
"""Whose quickest of `LEAST` steps takes this many times that of the best is stepped no more."""
BUILD_SHARE = 0.75
"""Of the time that all trials may take: until then strategies are built, the rest is for steps."""
LOOK_S = 0.1
"""Seconds between two looks at whether another rank's process has failed."""
_KEY = "hyper_parallel/trials"

Say = Callable[[str], None]
Step = Callable[[], float | None]
"""Takes a step; the seconds of this rank, None on every rank where some rank's failed."""


class Clock:
    """The time that all trials may take. Ranks read it together, so that they agree."""

    def __init__(self, seconds: float, worker: Worker) -> None:
        self.begun, self.seconds, self._worker = time.monotonic(), seconds, worker

    def left(self, share: float = 1.0) -> float:
        """Seconds of this rank until a share of the time is over."""
        return self.begun + share * self.seconds - time.monotonic()

    def over(self, share: float = 1.0) -> bool:
        """Whether it is over on some rank. A collective."""
        return _slowest(float(self.left(share) <= 0), self._worker) > 0


def tried(
    runs: Sequence[RunConfig], worker: Worker, *, at_once: bool, seconds: float, say: Say = lambda _: None
) -> list[float | None]:
    """Seconds of a step of each run, equal on every rank; None for one that cannot be run, or not in time. A
    collective.

    The lower quartile of some steps, on the slowest rank: what else the machine does only adds to a step, and not to
    all alike, so the quicker ones tell more of the strategy. `at_once`: all are built at once and stepped alternately,
    which levels what is slow for longer; else each is let go before the next is built. `seconds`: limit of all of it.
    """
    found: list[float | None] = [None] * len(runs)
    clock, places = Clock(seconds, worker), range(len(runs))
    secret = broadcast_text(_KEY, secrets.token_hex(16) if worker.rank == 0 else None)
    for group in [places] if at_once else [[place] for place in places]:
        trials: dict[int, Trial] = {}
        once: dict[int, float] = {}
        try:
            for place in group:
                share = BUILD_SHARE if once else 1.0
                if clock.over(share):
                    say(f"strategy {place + 1} of {len(runs)} is not tried: {seconds:.0f} s are over")
                    continue
                say(f"trying {place + 1} of {len(runs)} for a few steps")
                key = f"{_KEY}/{secret}/{place}"
                trials[place] = Trial(runs[place], Place.of(worker, address(), key, seconds))
                took, reason = _agreed(trials[place], key, worker, clock.left(share))
                if took is None:
                    say(f"strategy {place + 1} of {len(runs)} cannot be run: {reason}")
                    trials.pop(place).close()
                else:
                    once[place] = took
            steps = {
                place: _step_of(trials[place], f"{_KEY}/{secret}/{place}", worker, clock) for place in once
            }
            for place, quick in _timed(steps, once, worker, clock.over).items():
                found[place] = quick
        finally:
            for trial in trials.values():
                trial.release()
            for trial in trials.values():
                trial.close()
    return found


def _step_of(trial: Trial, key: str, worker: Worker, clock: Clock) -> Step:
    def step() -> float | None:
        trial.ask()
        return _agreed(trial, key, worker, clock.left())[0]

    return step


def _agreed(trial: Trial, key: str, worker: Worker, patience: float) -> tuple[float | None, str]:
    """This rank's seconds of what the processes of all ranks are at; None and a reason on every rank where one of them
    failed. A collective."""
    failed, until = f"{key}/failed", time.monotonic() + max(patience, LOOK_S)
    answer: Answer | None = None
    with pulse.operation("trying a strategy"):
        while answer is None and not is_left(failed):
            answer = trial.answer(LOOK_S)
            if answer is None and time.monotonic() > until:
                answer = Answer(reason="it takes longer than the time that is left (strategy.tries_seconds)")
        if answer is not None and answer.reason:
            leave_word(failed, f"rank {worker.rank}: {answer.reason}" if worker.world > 1 else answer.reason)
        if _slowest(float(answer is None or bool(answer.reason)), worker) > 0:
            return None, word_left(failed, GONE_S) or "a worker's process failed"
    assert answer is not None
    return answer.seconds, ""


GONE_S = 10.0
"""Seconds for a reason to arrive that a rank has left before."""


def _timed(
    steps: Mapping[int, Step], once: Mapping[int, float], worker: Worker, over: Callable[[], bool]
) -> dict[int, float]:
    """Seconds of each step on the slowest rank; those that cannot be taken are left out. `once`: seconds of one step
    of each."""
    if not steps:
        return {}
    rounds = round(min(max(SECONDS * len(once) / _slowest(sum(once.values()), worker), LEAST), MOST))
    taken: dict[int, list[float]] = {place: [] for place in steps}
    going = list(taken)
    collects = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds):
            for place in tuple(going):
                seconds = steps[place]()
                if seconds is None:
                    going.remove(place)
                    del taken[place]
                else:
                    taken[place].append(seconds)
            if over() or not going:
                break
            if turn + 1 == LEAST:
                least = {place: _slowest(min(taken[place]), worker) for place in going}
                going = [place for place in going if least[place] <= SLOW * min(least.values())]
    finally:
        if collects:
            gc.enable()
    return {place: _quick(seconds, worker) for place, seconds in taken.items()}


def _quick(seconds: Sequence[float], worker: Worker) -> float:
    """The lower quartile on the slowest rank."""
    least = seconds[0] if len(seconds) == 1 else statistics.quantiles(seconds, n=4, method="inclusive")[0]
    return _slowest(least, worker)


def _slowest(seconds: float, worker: Worker) -> float:
    """The largest of all ranks' numbers, on each of them."""
    found = torch.tensor(seconds, device=worker.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)
