"""Requests are admitted in order within memory, none starves, and pieces of prompts do not depend on the company."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.config.inference import Sampling
from hyper_parallel.inference.kv_cache.page_pool import PagePool
from hyper_parallel.inference.request import Request
from hyper_parallel.inference.scheduler import Scheduler

SHAPES = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 40)), min_size=1, max_size=25)


@given(SHAPES, st.integers(1, 12), st.sampled_from([32, 48, 96]), st.integers(9, 40))
def test_every_request_ends_within_memory(
    shapes: list[tuple[int, int]], batch: int, rows: int, pages: int
) -> None:
    pool = PagePool(pages, reuse=False)
    scheduler = Scheduler(batch, rows, 16, pool)
    requests = [Request(ids=(0,) * prompt, sampling=Sampling(max_tokens=most)) for prompt, most in shapes]
    scheduler.waiting.extend(enumerate(requests))
    begun, pieces = list[int](), dict[int, list[tuple[int, int]]]()
    while chosen := scheduler.next_pass():
        assert len(scheduler.running) <= batch
        assert sum(segment.count for _, segment in chosen) <= rows
        for one, segment in chosen:
            if one.number not in pieces:
                begun.append(one.number)
            pieces.setdefault(one.number, []).append((segment.first, segment.count))
            assert segment.end <= 16 * sum(run.count for run in one.runs)
        scheduler.passed(chosen)
        for one, segment in chosen:
            if segment.end == len(one.tokens):
                one.answer.tokens.append(0)
                one.tokens.append(0)
                if len(one.answer.tokens) == one.request.sampling.max_tokens:
                    scheduler.end(one)
    assert not scheduler.waiting
    assert pool.available == pages
    assert sorted(pieces) == list(range(len(shapes)))
    for number, (prompt, most) in enumerate(shapes):
        grid = [(first, min(16, prompt - first)) for first in range(0, prompt, 16)]
        assert pieces[number] == grid + [(prompt + token, 1) for token in range(most - 1)]


def _scheduler(rows: int, prompts: list[tuple[int, ...]], *, reuse: bool = False) -> Scheduler:
    found = Scheduler(4, rows, 16, PagePool(40, reuse=reuse))
    found.waiting.extend(
        enumerate(Request(ids=ids, sampling=Sampling(max_tokens=2)) for ids in prompts),
    )
    return found


def _pass(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    """The request, first position and count of each segment of the next pass."""
    chosen = scheduler.next_pass()
    starts = [segment.start for _, segment in chosen]
    assert starts == [sum(segment.count for _, segment in chosen[:place]) for place in range(len(chosen))]
    scheduler.passed(chosen)
    return [(one.number, segment.first, segment.count) for one, segment in chosen]


def test_a_prompt_fills_the_rows_that_are_left() -> None:
    scheduler = _scheduler(64, [(0,) * 100, (1,) * 40])
    assert _pass(scheduler) == [(0, 0, 16), (1, 0, 16), (0, 16, 16), (0, 32, 16)]
    assert _pass(scheduler) == [(0, 48, 16), (1, 16, 16), (0, 64, 16), (0, 80, 16)]
    assert _pass(scheduler) == [(0, 96, 4), (1, 32, 8)]


def test_segments_are_limited_where_memory_was_measured_for_so_many() -> None:
    scheduler = _scheduler(64, [(0,) * 100, (1,) * 40])
    scheduler.segments = 3
    assert _pass(scheduler) == [(0, 0, 16), (1, 0, 16), (0, 16, 16)]


def test_further_pieces_that_another_request_computes_are_waited_for() -> None:
    common = tuple(range(32))
    scheduler = _scheduler(96, [(*common, *(50,) * 20), (*common, *(60,) * 20)], reuse=True)
    assert _pass(scheduler) == [(0, 0, 16), (0, 16, 16), (0, 32, 16), (0, 48, 4)]
    assert _pass(scheduler) == [(0, 52, 1), (1, 32, 16), (1, 48, 4)]
    assert scheduler.shared == 32
