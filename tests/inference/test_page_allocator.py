"""Pages are never given twice, and all come back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.inference.run_allocator import Run, RunAllocator


@given(st.integers(0, 40), st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60))
def test_no_page_is_given_twice(pages: int, steps: list[tuple[bool, int]]) -> None:
    allocator, held = RunAllocator(pages), list[tuple[Run, ...]]()
    for takes, number in steps:
        if takes:
            free = allocator.free
            runs = allocator.allocate(number)
            assert (runs is None) == (number > free)
            if runs is not None:
                assert sum(run.count for run in runs) == number
                held.append(runs)
        elif held:
            allocator.release(held.pop(number % len(held)))
        used = [page for runs in held for run in runs for page in range(run.first, run.end)]
        assert len(used) == len(set(used)) == pages - allocator.free
        assert all(0 <= page < pages for page in used)
    for runs in held:
        allocator.release(runs)
    assert allocator.allocate(pages) == ((Run(0, pages),) if pages else ())


def test_a_run_where_there_is_one() -> None:
    allocator = RunAllocator(10)
    first, second = allocator.allocate(4), allocator.allocate(2)
    assert first is not None
    assert second is not None
    allocator.release(first)
    assert allocator.allocate(3) == (Run(0, 3),)
    assert allocator.allocate(5) == (Run(6, 4), Run(3, 1))


def test_a_run_at_the_high_end() -> None:
    allocator = RunAllocator(10)
    assert allocator.allocate_run(3, high=True) == Run(7, 3)
    assert allocator.allocate_run(3) == Run(0, 3)
    assert allocator.longest == allocator.free == 4
    assert allocator.allocate_run(5) is None
    allocator.release([Run(7, 3)])
    assert allocator.allocate_run(5, high=True) == Run(5, 5)
