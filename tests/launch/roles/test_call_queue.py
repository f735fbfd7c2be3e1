"""The calls of a group, without workers: whatever is heard in whatever order, each ends once, in time, with its own."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.errors import DataError, GroupError, HyperParallelError
from hyper_parallel.launch.roles.call_queue import CallQueue, sent_lists
from hyper_parallel.launch.roles.protocol import Future, Instruction, WorkerReport
from hyper_parallel.launch.worker_failure import SETTLE_S, Failure

SIZE = 3
LIST = [[Instruction("generate"), Instruction("score")]] * SIZE


class Bench:
    """A queue, a clock, and what was asked of it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.queue = CallQueue("rollout", SIZE, lambda rank: Path(f"{rank}.log"), clock=lambda: self.now)
        self.futures: list[tuple[Future, float, int]] = []
        self.sent: list[int] = []

    def begin(self) -> None:
        future = self.queue.begin(5.0)
        for rank in range(SIZE):
            self.queue.heard(rank, ("done", 0, pickle.dumps([])))
        self.turn()
        assert future.result() == [[]] * SIZE

    def submit(self, timeout: float) -> Future:
        future = self.queue.submit(LIST, sent_lists("rollout", SIZE, LIST), timeout, "step 4")
        self.futures.append((future, self.now + timeout, 0 if future.done() else self.queue._next - 1))
        self.turn()
        return future

    def turn(self) -> bool:
        killed = self.queue.look()
        call = self.queue.to_send()
        if call is not None:
            assert not killed
            self.sent.append(call.number)
        return killed


def _report(bench: Bench, rank: int, kind: str) -> WorkerReport:
    failure = Failure(rank, kind, f"{kind} of {rank}", bench.now)  # type: ignore[arg-type]
    return WorkerReport(failure=failure, error_class="DataError")


events = st.one_of(
    st.tuples(st.just("submit"), st.floats(0.1, 10), st.just(0)),
    st.tuples(st.just("pass"), st.floats(0.01, 8), st.just(0)),
    st.tuples(st.just("done"), st.integers(0, SIZE - 1), st.integers(-2, 0)),
    st.tuples(st.just("all"), st.just(0), st.integers(-1, 0)),
    st.tuples(st.just("at"), st.integers(0, SIZE - 1), st.integers(-1, 0)),
    st.tuples(st.sampled_from(["error", "crash", "lost"]), st.integers(0, SIZE - 1), st.integers(-1, 0)),
    st.tuples(st.just("ended"), st.integers(0, SIZE - 1), st.just(0)),
    st.tuples(st.just("restart"), st.just(0), st.just(0)),
)


@given(st.lists(events, max_size=60))
def test_each_call_ends_once_in_time_and_with_its_own_answers(
    given_events: list[tuple[str, float, int]],
) -> None:
    bench = Bench()
    bench.begin()
    killed = False
    for kind, value, offset in given_events:
        number = (bench.sent[-1] if bench.sent else 1) + offset
        rank = int(value)
        if kind == "submit":
            bench.submit(value)
        elif kind == "pass":
            bench.now += value
        elif kind == "restart":
            bench.queue.stop("it was restarted")
            assert all(future.done() for future, *_ in bench.futures)
            bench.begin()
            killed = False
        elif kind == "ended":
            bench.queue.ended(rank, Failure(rank, "died", "was killed", bench.now))
        elif kind in ("done", "all"):
            for one in range(SIZE) if kind == "all" else [rank]:
                bench.queue.heard(one, ("done", number, pickle.dumps((number, one))))
        elif kind == "at":
            bench.queue.heard(rank, ("at", number, 1))
        else:
            bench.queue.heard(rank, ("failed", number, 1, _report(bench, rank, kind)))
        sent = len(bench.sent)
        killed = bench.turn() or killed
        assert not (killed and len(bench.sent) > sent), "nothing is sent to workers that are killed"
        assert killed == (bench.queue.broken is not None)
        for future, deadline, _ in bench.futures:
            assert future.done() or bench.now < deadline
        assert bench.queue.next_look() > bench.now
    assert bench.sent == sorted(set(bench.sent))
    for future, _, number in bench.futures:
        if future.done() and (error := future._inner.exception()) is None:
            assert future.result() == [(number, rank) for rank in range(SIZE)]
        elif future.done():
            assert (
                isinstance(error, HyperParallelError) and "\n" not in str(error) and "rollout" in str(error)
            )


def test_an_error_waits_for_the_cause_and_a_lost_connection_is_not_it() -> None:
    bench = Bench()
    bench.begin()
    future = bench.submit(60.0)
    bench.queue.heard(2, ("failed", 1, 0, _report(bench, 2, "lost")))
    assert not bench.turn() and not future.done()
    bench.now += SETTLE_S / 2
    bench.queue.ended(0, Failure(0, "died", "was killed by SIGKILL", bench.now))
    assert bench.turn()
    with pytest.raises(
        GroupError, match=r"rollout 0 was killed by SIGKILL in generate \(not begun\), step 4"
    ):
        future.result()


def test_a_lost_connection_that_nothing_explains_is_shown_after_a_while() -> None:
    bench = Bench()
    bench.begin()
    future = bench.submit(60.0)
    bench.queue.heard(2, ("failed", 1, 0, _report(bench, 2, "lost")))
    bench.turn()
    bench.now = bench.queue.next_look()
    assert bench.turn()
    with pytest.raises(
        GroupError, match=r"rollout 2 lost the other workers, and none says why \(lost of 2\)"
    ):
        future.result()


def test_an_error_of_every_rank_is_the_earliest_one_and_the_group_stays() -> None:
    bench = Bench()
    bench.begin()
    future = bench.submit(60.0)
    for rank in (1, 0, 2):
        bench.queue.heard(rank, ("failed", 1, 1, _report(bench, rank, "error")))
        bench.now += 0.1
    assert not bench.turn()
    with pytest.raises(DataError, match=r"rollout 1, score \(2 of 2\), step 4: error of 1"):
        future.result()
    bench.submit(60.0)
    assert bench.sent == [1, 2]


def test_time_in_which_the_controller_was_suspended_does_not_count() -> None:
    bench = Bench()
    bench.begin()
    future = bench.submit(5.0)
    bench.now += 100
    bench.queue.postpone(100)
    assert not bench.turn() and not future.done()
    bench.now += 5.0
    assert bench.turn() and future.done()


def test_ranks_with_the_same_list_share_its_bytes_and_others_do_not() -> None:
    own = [Instruction("generate", {"rows": 3})]
    first, second, third = sent_lists("rollout", SIZE, [LIST[0], own, LIST[0]])
    assert first is third and pickle.loads(second) == [("generate", {"rows": 3})]
