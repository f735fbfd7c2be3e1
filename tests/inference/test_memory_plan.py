"""The plan of a byte budget: within it, the smallest one is tight, and the stream buffer never lacks room."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.inference.memory_plan import MemoryPlan, Module, Sizes, make_plan, pair_bytes, smallest
from hyper_parallel.inference.run_allocator import Run
from hyper_parallel.inference.weights.read_ahead import StreamBuffer
from hyper_parallel.inference.weights.units import ALIGN

MODULES = st.lists(
    st.builds(
        Module, name=st.just("m"), bytes=st.integers(1, 9).map(lambda n: n * ALIGN), gatherable=st.booleans()
    ),
    max_size=8,
)


@given(
    MODULES,
    st.integers(0, 500),
    st.integers(0, 50),
    st.integers(0, 4),
    st.integers(0, 300),
    st.integers(0, 3000),
)
def test_plans_keep_the_budget_and_the_smallest_has_one(
    modules: list[Module], fixed: int, page: int, pages: int, workspace: int, more: int
) -> None:
    sizes = Sizes(tuple(modules), fixed, page)
    least = smallest(sizes, pages=pages, workspace=workspace)

    def plan(budget: int) -> MemoryPlan | None:
        return make_plan(sizes, budget, requests=1, pages=pages, workspace=workspace)

    assert plan(least - 1) is None
    one, richer = plan(least), plan(least + more)
    assert one is not None
    assert richer is not None
    assert one.device == least
    assert richer.device <= least + more
    for found in (one, richer):
        streamed = found.streamed
        assert found.buffer >= pair_bytes(modules, streamed)
        assert all(modules[place].gatherable for place in found.gathered)
    whole = plan(fixed + page * pages + workspace + sum(module.bytes for module in modules))
    assert whole is not None
    assert whole.read == 0


def test_what_stays_is_spread_over_the_pass() -> None:
    sizes = Sizes((Module("layer", 64),) * 12, 0, 0)
    plan = make_plan(sizes, 8 * 64, requests=1, pages=0, workspace=0)
    assert plan is not None
    assert len(plan.resident) == 6
    gaps = [after - before for before, after in itertools.pairwise(sorted(plan.resident))]
    assert max(gaps) == 2


def test_a_pass_with_more_requests_is_cheaper_by_the_token() -> None:
    """Memory for KV pages is worth more than for weights while the pass is read from a tier."""
    sizes = Sizes((Module("layer", 6400),) * 10, 0, 64)
    few = make_plan(sizes, 30_000, requests=1, pages=1, workspace=0)
    many = make_plan(sizes, 30_000, requests=16, pages=16, workspace=0)
    assert few is not None
    assert many is not None
    assert many.read >= few.read
    assert many.cost < few.cost


@given(st.lists(st.integers(1, 9).map(lambda n: n * ALIGN), min_size=2, max_size=7), st.integers(0, 5))
def test_two_neighbours_always_fit_into_the_buffer(sizes: list[int], more: int) -> None:
    """One computes while the next is read, in a circle, whatever their sizes."""
    modules = [Module("m", size) for size in sizes]
    buffer = StreamBuffer(pair_bytes(modules, range(len(sizes))))
    held: list[Run] = []
    for size in sizes * (2 + more):
        region = buffer.take(size)
        assert region is not None
        assert all(region.end <= one.first or one.end <= region.first for one in held)
        held.append(region)
        if len(held) == 2:
            buffer.give(held.pop(0))
