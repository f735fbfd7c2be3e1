"""Storages as large as the data say: what bounds them, where the host looks, and slots that are not full."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.captured import family_config, micro_batches, recipe_of, shape_of
from harness.equivalence import draw_batch
from harness.families import FAMILIES
from harness.slots import Shelf
from hyper_parallel.cluster import Cluster
from hyper_parallel.compat import registry
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.errors import BudgetError, GraphError
from hyper_parallel.graph import Slot, StepGraph, balanced_sizes, lifetimes, values_of
from hyper_parallel.graph.dependencies import check_order
from hyper_parallel.graph.dynamic_sizes import known, largest_sizes, uncertain
from hyper_parallel.graph.host_nodes import HOST
from hyper_parallel.graph.ir import Value
from hyper_parallel.offloading import Runtime
from hyper_parallel.offloading.expert_overflow import changed_before, wanted
from hyper_parallel.offloading.schedule.build_problem import build_problem
from hyper_parallel.offloading.schedule.host_update_pass import can_run_on_host, move_to_host
from hyper_parallel.offloading.schedule.offload_pass import planned
from hyper_parallel.offloading.schedule.problem import OffloadTier, Rate
from hyper_parallel.offloading.tiers import FlashTier, HostTier, Tier
from hyper_parallel.step.capture_train_step import capture_step

HOST_SPACE = OffloadTier("host", 2**40, Rate(1e-5, 1e9), Rate(1e-5, 1e9))
CLUSTER = Cluster.named("h100")


def _captured(**strategy: Any) -> StepGraph:
    fields = FAMILIES["mixtral"]
    axes = {"shard": 4, "expert": 4}
    memory = {"device": 2**30, "host": 2**30}
    config = family_config(fields, {"axes": axes, "memory": memory, **strategy})
    with fake_ranks(4, 0):
        recipe = recipe_of(fields, config)
        return capture_step(recipe, shape_of(micro_batches(recipe.handle, config, draw_batch(fields)), False))


@pytest.fixture(scope="module")
def step() -> StepGraph:
    return _captured()


def _routed(step: StepGraph, draw: random.Random, load: float) -> dict[Any, int]:
    """Sizes of some routing in which a rank gets up to `load` times its even share."""
    found: dict[Any, int] = {}
    for part in sorted({even.part for even in step.even.values()}):
        symbols = [symbol for symbol, even in step.even.items() if even.part == part]
        rows = sum(step.even[symbol].rows for symbol in symbols)
        if step.even[symbols[0]].scales:
            rows = min(step.even[symbols[0]].most, int(load * rows * draw.choice((0.0, draw.random(), 1.0))))
        cuts = sorted(draw.randint(0, rows) for _ in symbols[1:])
        found.update(
            zip(symbols, (b - a for a, b in zip([0, *cuts], [*cuts, rows], strict=True)), strict=True)
        )
    return found


def test_no_routing_within_the_load_makes_a_storage_larger_than_its_bound(step: StepGraph) -> None:
    draw = random.Random(0)
    sized = [storage for storage in step.storages if not isinstance(storage.bytes, int)]
    assert uncertain(step)
    reached = set()
    for load in (1.0, 1.5, 2.3, 4.0, 100.0):
        largest = largest_sizes(step, load)
        for _ in range(10):
            routed = _routed(step, draw, load)
            for storage in sized:
                bound, size = known(storage.bytes, largest), known(storage.bytes, routed)
                assert size <= bound
                reached.add((load, storage.index)) if size == bound else None
    # The bounds are no larger than they must be.
    assert len(reached) == 5 * len(sized)


def test_what_leaves_a_rank_is_certain_whatever_the_load(step: StepGraph) -> None:
    rows = 128
    for load in (1.0, 3.0):
        sizes = largest_sizes(step, load)
        for part in (0, 3):
            assert sum(sizes[symbol] for symbol, even in step.even.items() if even.part == part) == rows


def test_with_replicas_no_more_stays_or_leaves_than_a_rank_has() -> None:
    step = _captured(expert_replicas={"*.experts": [0, 5]})
    sizes = largest_sizes(step, 1.0)
    first = {even.part: even.most for even in step.even.values()}
    totals = {part: sum(sizes[s] for s, even in step.even.items() if even.part == part) for part in first}
    assert totals[0] == totals[3] == 128  # to other ranks, and to replicas: at most all that it has
    assert len(lifetimes(step, sizes)) > 0


def test_a_storage_of_some_of_the_rows_is_refused(step: StepGraph) -> None:
    some = step.copy()
    symbol = next(storage.bytes for storage in some.storages if not isinstance(storage.bytes, int))
    one = next(iter(some.sizes))
    number = next(n for n in some.storages if not isinstance(n.bytes, int))
    assert symbol is number.bytes
    some.storages[number.index] = type(number)(number.index, _symbolic(one, number.bytes), number.device)
    with pytest.raises(BudgetError, match="no bound is known"):
        largest_sizes(some, 1.5)


def _symbolic(symbol: Any, like: torch.SymInt) -> torch.SymInt:
    """The size that is this symbol alone."""
    return like.node.shape_env.create_symintnode(symbol, hint=None)


def test_the_host_looks_before_anything_of_uncertain_size_is_there(step: StepGraph) -> None:
    nodes = list(step.nodes)
    looked = [at for at, node in enumerate(nodes) if node.target is HOST and node.args[0] == "rows"]
    assert len(looked) == 2  # one for each layer
    numbers = {storage.index for storage in step.storages if not isinstance(storage.bytes, int)}
    born: dict[int, int] = {}
    for at, node in enumerate(nodes):
        for value in values_of(node):
            born.setdefault(value.storage, at)
    assert looked[0] < min(born[storage] for storage in numbers)
    # And no rewrite may change that.
    read = next(at for at in range(looked[0], len(nodes)) if nodes[at] in step.sizes.values())
    moved = [*nodes[: looked[0]], nodes[read], *nodes[looked[0] : read], *nodes[read + 1 :]]
    assert {*moved} == {*nodes}
    with pytest.raises(GraphError, match="the host looks before it reads"):
        check_order(step, moved)


def test_a_plan_for_more_rows_needs_more_and_says_so(step: StepGraph) -> None:
    plans = [planned(step, CLUSTER, 2**30, (HOST_SPACE,), load=load) for load in (1.0, 2.0)]
    peaks = [max(plan.problem.profile()) for plan in plans]
    assert peaks[0] < peaks[1]
    assert "experts' rows at most 2 times their even share" in str(plans[1])
    moves = {held.storage for held in plans[1].problem.held if held.movable}
    assert moves >= {storage.index for storage in step.storages if not isinstance(storage.bytes, int)} & moves
    assert any(not isinstance(step.storages[storage].bytes, int) for storage in moves)


def test_what_lies_among_several_results_moves_only_once_it_was_taken_out() -> None:
    memory = {"device": 2**30, "host": 2**30, "recompute": "layer"}
    step = _captured(memory=memory)
    sizes = balanced_sizes(step), largest_sizes(step, 1.5)
    problem = build_problem(step, CLUSTER, 0, (HOST_SPACE,), *sizes)
    named: dict[int, int] = {}
    for at, node in enumerate(step.nodes):
        if isinstance(node.meta.get("value"), Value):
            named.setdefault(node.meta["value"].storage, at)
    late = [held for held in problem.held if named.get(held.storage, -1) > held.busy[0].first]
    assert late  # a rewrite put other nodes between
    assert all(held.busy[0].last >= named[held.storage] for held in late)


def test_updates_can_run_on_the_host_in_a_step_of_uncertain_size(step: StepGraph) -> None:
    apart = can_run_on_host(step)
    made = move_to_host(step, [apart[0].parameter], "host")
    sizes = balanced_sizes(made), largest_sizes(made, 1.5)
    assert len(build_problem(made, CLUSTER, 0, (HOST_SPACE,), *sizes).updates) == 1


def test_a_step_can_be_run_again_that_has_changed_nothing(step: StepGraph) -> None:
    assert changed_before(step) is None
    assert wanted(2.0) == (2.2, 2.0)


@pytest.mark.parametrize("name", ["host", "flash"])
def test_a_slot_holds_as_many_bytes_as_there_were(step: StepGraph, name: str, tmp_path: Path) -> None:
    backend = registry.backend("cpu")
    tier: Tier = HostTier(backend, 2**20) if name == "host" else FlashTier(tmp_path, backend)
    room = step.copy()
    room.slots = {0: Slot(0, name, 4096)}
    runtime = Runtime(room, {name: tier})
    tier.reserve({0: 4096})
    try:
        for count in (1024, 7, 0):
            x = torch.arange(count, dtype=torch.float32)
            runtime.store(x, 0, name)
            runtime.wait(x, 0, name)
            runtime.detach(x, 0, name)
            assert x.untyped_storage().nbytes() == 0
            runtime.prefetch(x, 0, name)
            runtime.wait(x, 0, name)
            assert x.untyped_storage().nbytes() == 4 * count
            assert torch.equal(x, torch.arange(count, dtype=torch.float32))
    finally:
        tier.close()


@pytest.mark.parametrize("rest", ["away", "here", "step"])
def test_a_step_that_was_stopped_leaves_state_where_it_is_between_steps(step: StepGraph, rest: Any) -> None:
    held = step.copy()
    entry, node = held.inputs[0], held.placeholders[0]
    (value,) = values_of(node)
    held.slots = {0: Slot(value.storage, "host", 64, rest)}
    shelf = Shelf()
    shelf.reserve({0: 64})
    runtime = Runtime(held, {"host": shelf})
    x = torch.arange(16, dtype=torch.float32)
    runtime.rest(entry.name, x)
    if rest == "away":
        runtime.prefetch(x, 0, "host")  # and never waited for
    else:
        runtime.store(x, 0, "host")
        runtime.wait(x, 0, "host")
        runtime.detach(x, 0, "host")
    runtime.stopped({entry.name: x})
    assert (x.untyped_storage().nbytes() == 0) == (rest == "away")
    with runtime.present(entry.name, x):
        assert torch.equal(x, torch.arange(16, dtype=torch.float32))
