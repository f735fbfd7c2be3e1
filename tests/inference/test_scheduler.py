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
