"""The order that list scheduling gives: legal, within its bounds, and as good as known optima."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.overlap.list_scheduling import COMPUTE, FREE, Job, arrange, replayed


@st.composite
def job_lists(draw: st.DrawFn) -> list[Job]:
    """Jobs as a graph has them: a collective is read through a wait."""
    jobs: list[Job] = []
    usable: list[int] = []
    for _ in range(draw(st.integers(1, 40))):
        after = tuple(sorted(draw(st.sets(st.sampled_from(usable), max_size=3)))) if usable else ()
        kind = draw(st.sampled_from([COMPUTE, COMPUTE, FREE, "comm:a", "comm:b"]))
        seconds = 0.0 if kind == FREE else float(draw(st.integers(1, 5)))
        own = len(jobs)
        uses = (own, *(storage for other in after for storage in jobs[other].uses[:1]))
        lane = max((jobs[other].lane for other in after), default=draw(st.integers(0, 2)))
        jobs.append(Job(seconds, kind, after, None, ((own, draw(st.integers(0, 9))),), uses, lane))
        if kind.startswith("comm"):
            jobs.append(Job(0.0, FREE, (own,), own, (), (own,), lane))
        usable.append(len(jobs) - 1)
    return jobs


@settings(max_examples=80, deadline=None)
@given(
    job_lists(),
    st.sampled_from([0.0, 3.0, math.inf]),
    st.integers(1, 2),
    st.sampled_from([20, math.inf]),
    st.sampled_from([1.0, math.inf]),
)
def test_any_jobs_are_arranged_legally_and_alike_each_time(
    jobs: list[Job], window: float, together: int, budget: float, patience: float
) -> None:
    found = arrange(jobs, window=window, budget=budget, together=together, slowdown=1.5, patience=patience)
    assert sorted(found.order) == list(range(len(jobs)))
    place = {index: at for at, index in enumerate(found.order)}
    assert all(place[other] < place[index] for index, job in enumerate(jobs) for other in job.after)
    assert replayed(jobs, found.order, slowdown=1.5) == found
    assert (
        arrange(jobs, window=window, budget=budget, together=together, slowdown=1.5, patience=patience)
        == found
    )


def _wait(of: int, lane: int = 0) -> Job:
    return Job(0.0, FREE, (of,), of, lane=lane)


def test_a_collective_begins_before_what_does_not_need_it() -> None:
    jobs = [
        Job(1.0, COMPUTE),
        Job(2.0, "comm:a", (0,)),
        _wait(1),
        Job(1.0, COMPUTE, (2,)),
        Job(2.0, COMPUTE, (0,)),
    ]
    assert replayed(jobs).seconds == 1 + 2 + 1 + 2
    found = arrange(jobs)
    assert found.seconds == 1 + 2 + 1
    assert found.order == (0, 1, 4, 2, 3)


def test_two_lanes_hide_each_others_collectives() -> None:
    """A chain of 8 kernels and collectives in each of two lanes: one lane computes while the other one sends."""
    jobs: list[Job] = []
    for lane in range(2):
        last: tuple[int, ...] = ()
        for _ in range(8):
            jobs.append(Job(1.0, COMPUTE, last, lane=lane))
            jobs.append(Job(1.0, "comm:a", (len(jobs) - 1,), lane=lane))
            jobs.append(_wait(len(jobs) - 1, lane))
            last = (len(jobs) - 1,)
    assert replayed(jobs).seconds == 2 * 8 * 2
    assert arrange(jobs, together=2).seconds == 2 * 8 + 1


def test_a_window_keeps_gathers_from_running_far_ahead() -> None:
    """Ten layers, each with a gather of its own: with a window of one layer two gathered weights are held at once."""
    jobs: list[Job] = []
    for layer in range(10):
        at = len(jobs)
        before = (at - 1,) if layer else ()
        jobs.append(Job(0.5, "comm:shard", (), None, ((layer, 1),), (layer,)))
        jobs.append(Job(0.0, FREE, (at,), at, (), (layer,)))
        jobs.append(Job(1.0, COMPUTE, (at + 1, *before), None, (), (layer,)))
    assert replayed(jobs).seconds == 15
    far, near = arrange(jobs), arrange(jobs, window=1.5)
    assert far.seconds == near.seconds == 0.5 + 10
    assert near.bytes == 2 < far.bytes
    assert arrange(jobs, budget=3).bytes <= 3


def test_an_urgent_collective_overtakes_one_that_nothing_waits_for() -> None:
    jobs = [
        Job(1.0, COMPUTE),
        Job(4.0, "comm:a", (0,)),
        Job(1.0, "comm:a", (0,)),
        _wait(2),
        Job(5.0, COMPUTE, (3,)),
        _wait(1),
    ]
    assert replayed(jobs).seconds == 1 + 4 + 1 + 5
    assert arrange(jobs).seconds == 1 + 1 + 5


def test_a_wait_for_what_is_over_lets_go_of_memory() -> None:
    jobs = [
        Job(1.0, COMPUTE, makes=((0, 10),), uses=(0,)),
        Job(1.0, "comm:a", after=(0,), uses=(0,)),
        *(Job(1.0, COMPUTE, after=(0,)) for _ in range(4)),
        Job(1.0, COMPUTE, after=(2, 3, 4, 5), makes=((1, 100),), uses=(1,)),
        Job(0.0, FREE, after=(1,), waits=1, uses=(0,)),
        Job(1.0, COMPUTE, after=(6, 7)),
    ]
    late, soon = arrange(jobs), arrange(jobs, patience=1.0)
    assert (late.bytes, soon.bytes) == (110, 100)
    assert late.seconds == soon.seconds == 7.0
