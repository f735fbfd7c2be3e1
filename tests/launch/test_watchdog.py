"""Which rank stopped first, from heartbeats alone: clocks are numbers here, and nothing waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from hyper_parallel.launch.heartbeat import Beat
from hyper_parallel.launch.watchdog import Activity, Suspect, Watchdog

RUNNING = Beat(step=7, operation="step", patient=False, step_time=0.1)
LOOK_S = 0.25


class _Ranks:
    """Four ranks that are heard once a second, on a clock of the test's."""

    def __init__(self, timeout: float | None = None, world: int = 4, beat: Beat = RUNNING) -> None:
        self.watchdog = Watchdog(range(world), timeout)
        self.now = 0.0
        self.beats = dict.fromkeys(range(world), beat)

    def go_on(
        self,
        seconds: float,
        *,
        silent: tuple[int, ...] = (),
        moves: Callable[[int, Beat], Beat] = lambda rank, beat: replace(beat, progress=beat.progress + 9),
        does: Mapping[int, Activity] | None = None,
    ) -> Suspect | None:
        """So many seconds; the suspect, as soon as there is one."""
        for count in range(1, int(seconds / LOOK_S) + 1):
            self.now += LOOK_S
            if count % 4 == 0:
                for rank in set(self.beats) - set(silent):
                    self.beats[rank] = moves(rank, self.beats[rank])
                    self.watchdog.hear(rank, self.beats[rank])
            found = self.watchdog.look(self.now, lambda rank: (does or {}).get(rank, "idle"))
            if found is not None:
                return found
        return None


def _stands(rank: int, beat: Beat) -> Beat:
    return beat


@pytest.mark.parametrize("frozen", range(4))
def test_the_silent_rank_is_named_within_a_minute_and_the_others_are_not(frozen: int) -> None:
    ranks = _Ranks()
    assert ranks.go_on(30) is None
    found = ranks.go_on(61, silent=(frozen,), moves=_stands, does={frozen: "stopped"})
    assert found is not None and found.rank == frozen
    assert "its process is stopped" in found.how and "it was last heard in step 7" in found.how


def test_of_two_silent_ranks_the_first_is_named() -> None:
    ranks = _Ranks()
    assert ranks.go_on(10) is None
    assert ranks.go_on(3, silent=(2,)) is None
    found = ranks.go_on(100, silent=(2, 1))
    assert found is not None and found.rank == 2


def test_a_run_that_is_suspended_as_a_whole_is_left_alone() -> None:
    ranks = _Ranks()
    assert ranks.go_on(10) is None
    assert ranks.go_on(5000, silent=(0, 1, 2, 3)) is None
    # It goes on, and one rank is a little later than the others.
    assert ranks.go_on(20, silent=(3,)) is None
    assert ranks.go_on(20) is None


def test_a_watcher_that_was_suspended_itself_counts_a_second() -> None:
    ranks = _Ranks()
    assert ranks.go_on(10) is None
    ranks.now += 100_000
    assert ranks.go_on(40, silent=(1,), moves=_stands) is None


def test_a_silent_process_that_computes_is_left_alone() -> None:
    ranks = _Ranks()
    assert ranks.go_on(2000, silent=(1,), moves=_stands, does={1: "busy"}) is None


def test_a_rank_that_does_not_come_to_a_collective_is_named_by_where_it_is() -> None:
    ranks = _Ranks(timeout=20)
    assert ranks.go_on(10) is None
    ranks.beats = {
        rank: replace(beat, collectives=41 if rank == 2 else 42, waits=rank != 2, where="sleep at a.py:3")
        for rank, beat in ranks.beats.items()
    }
    assert ranks.go_on(15, moves=_stands) is None
    found = ranks.go_on(15, moves=_stands)
    assert found is not None and found.rank == 2 and "in step 7, in sleep at a.py:3" in found.how


def test_the_limit_follows_the_steps_and_is_a_minute_at_least() -> None:
    quick, slow = _Ranks(), _Ranks(beat=replace(RUNNING, step_time=30.0))
    for ranks in (quick, slow):
        assert ranks.go_on(10) is None
        assert ranks.go_on(50, moves=_stands) is None
    assert quick.go_on(20, moves=_stands) is not None
    assert slow.go_on(400, moves=_stands) is None, "not before 20 steps"
    assert slow.go_on(200, moves=_stands) is not None


@pytest.mark.parametrize("timeout", [None, 20.0])
def test_an_operation_that_takes_its_time_has_it(timeout: float | None) -> None:
    ranks = _Ranks(timeout=timeout, beat=replace(RUNNING, operation="saving", patient=True))
    assert ranks.go_on(3000, moves=_stands) is None
    found = ranks.go_on(1000, moves=_stands)
    assert found is not None and "have stood still" in found.how and "step 7, saving" in found.how


@pytest.mark.parametrize(
    "beat",
    [
        replace(RUNNING, operation="planning", patient=True),
        Beat(operation="running", patient=False),  # a target of the user's own, which declares no steps
    ],
)
def test_who_computes_where_no_step_limits_it_is_left_alone(beat: Beat) -> None:
    ranks = _Ranks(beat=beat)
    assert ranks.go_on(9000, moves=lambda rank, beat: replace(beat, cpu=beat.cpu + (rank == 0))) is None
    assert ranks.go_on(4000, moves=_stands) is not None


def test_who_waits_with_a_busy_processor_in_a_step_is_limited() -> None:
    ranks = _Ranks()
    assert ranks.go_on(70, moves=lambda rank, beat: replace(beat, cpu=beat.cpu + 1)) is not None


def test_a_rank_that_has_ended_is_not_missed() -> None:
    ranks = _Ranks()
    assert ranks.go_on(10) is None
    ranks.watchdog.forget(1)
    assert ranks.go_on(200, silent=(1,)) is None


def _in(instruction: str, *, waits: bool, **beat: int) -> Beat:
    return replace(RUNNING, instruction=instruction, waits=waits, **beat)


def test_in_a_schedule_the_rank_that_does_not_wait_is_named_though_it_has_begun_more_collectives() -> None:
    ranks = _Ranks(timeout=10, world=3)
    assert ranks.go_on(5) is None
    ranks.beats = {
        0: _in("stage 0, Wait(x)", waits=True, collectives=1),
        1: _in("stage 1, Run(forward 1)", waits=False, collectives=9),
        2: replace(RUNNING, waits=True, collectives=4),  # it has ended its schedule
    }
    found = ranks.go_on(20, moves=_stands)
    assert found is not None and found.rank == 1
    assert "while the others wait for it; it is in step 7, stage 1, Run(forward 1)" in found.how
    assert found.how.endswith("; worker 0 is in step 7, stage 0, Wait(x)")


def test_where_all_wait_the_rank_that_stopped_first_is_named_and_what_each_waits_for() -> None:
    ranks = _Ranks(timeout=10, world=6)
    waiting = {rank: _in(f"stage {rank}, Wait(x)", waits=True) for rank in ranks.beats}
    ranks.beats = waiting
    assert ranks.go_on(3) is None
    assert ranks.go_on(3, moves=lambda rank, beat: beat if rank == 4 else replace(beat, progress=1)) is None
    found = ranks.go_on(20, moves=_stands)
    assert found is not None and found.rank == 4
    assert found.how.startswith("stopped first, and every other one here stands still too, for ")
    assert "it is in step 7, stage 4, Wait(x); worker 0 is in step 7, stage 0, Wait(x); " in found.how
    assert found.how.endswith("; worker 2 is in step 7, stage 2, Wait(x); 2 more are in the schedule too")


def test_the_board_knows_better_than_the_last_heartbeat() -> None:
    board = {0: (9, "stage 0, Run(forward 0)"), 1: (9, "")}
    watchdog = Watchdog(range(2), None, board=board.__getitem__)
    for rank in range(2):
        watchdog.hear(rank, replace(RUNNING, operation="saving", instruction="stage 5, Run(forward 5)"))
    assert watchdog.position(0) == "in step 9, stage 0, Run(forward 0)" and watchdog.scheduled(0)
    assert watchdog.position(1) == "in step 9, saving" and not watchdog.scheduled(1)
    assert watchdog.others_in_schedule(1) == "worker 0 is in step 9, stage 0, Run(forward 0)"
