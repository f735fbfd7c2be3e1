"""Steps whose storages move: the same bits, live bytes as the problem says, and a graph that says what it does."""

from __future__ import annotations

import functools
import random

import pytest
import torch

from harness.family_steps import Running, captured_step
from harness.slots import Poisoning, Shelf
from hyper_parallel.cluster import Cluster
from hyper_parallel.errors import GraphError
from hyper_parallel.graph import StepGraph, ir, lifetimes, lower, peak, validate, workspaces
from hyper_parallel.graph.liveness import peak_of
from hyper_parallel.offloading.runtime import Runtime
from hyper_parallel.offloading.schedule.build_problem import build_problem
from hyper_parallel.offloading.schedule.offload_pass import apply
from hyper_parallel.offloading.schedule.problem import Buffer, Move, OffloadTier, Problem, Rate
from hyper_parallel.simulator import simulate

HOST = OffloadTier("host", 2**40, Rate(1e-5, 1e9), Rate(1e-5, 1e9))
CLUSTER = Cluster.named("h100")


def _moves(problem: Problem, draw: random.Random | None) -> list[Move]:
    """Every gap that there is, from its beginning to its end; with `draw`, some of them and at some places."""
    found: list[Move] = []
    for held in problem.held:
        gaps = held.gaps(problem.nodes) if held.movable else []
        chosen = [
            at
            for at, (first, last) in enumerate(gaps)
            if last > first and (draw is None or draw.random() < 0.6)
        ]
        for at in chosen:
            first, last = gaps[at]
            if draw is None:
                found.append(
                    Move(held.storage, "host", at, _needs_store(held, chosen, at, first), first, last)
                )
            else:
                leave, fetch = sorted(draw.choices(range(first, last + 1), k=2))
                if leave < fetch:
                    store = draw.randint(_final(held, problem.nodes, chosen, at), leave)
                    found.append(Move(held.storage, "host", at, store, leave, fetch))
    return found


def _final(held: Buffer, nodes: int, chosen: list[int], at: int) -> int:
    """First place at which a store may begin: what it copies is final, and there since the gap chosen before."""
    gaps = held.gaps(nodes)
    back = [gaps[other][1] - (nodes if other > at else 0) for other in chosen if other != at]
    return max([held.opens(nodes)[at], *(place + 1 for place in back)])


def _needs_store(held: Buffer, chosen: list[int], at: int, first: int) -> int | None:
    """Nothing is stored twice that was not written in between."""
    before = held.busy[: at + 1] if chosen[0] == at else held.busy[chosen[chosen.index(at) - 1] + 1 : at + 1]
    return first if chosen[0] == at or any(busy.writes for busy in before) else None


captured = functools.cache(captured_step)


@functools.cache
def plain(family: str) -> dict[str, torch.Tensor]:
    """What three steps come to without moves."""
    return Running(family, captured(family)).after(3)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_moved_steps_give_the_same_bits_and_hold_what_the_problem_says(family: str, seed: int | None) -> None:
    step: StepGraph = captured(family)
    problem = build_problem(step, CLUSTER, 0, (HOST,))
    moves = _moves(problem, None if seed is None else random.Random(seed))
    assert len(moves) > 50
    moved = apply(step, problem, moves)
    validate(step, moved)
    runtime = (Runtime if seed == 0 else Poisoning)(moved, {"host": Shelf.of(moved)})
    got = Running(family, moved, runtime).after(3)
    assert plain(family).keys() == got.keys()
    for name, tensor in plain(family).items():
        assert torch.equal(tensor, got[name]), name
    assert runtime.moved > 0
    assert peak_of([*lifetimes(moved), *workspaces(moved)]).bytes == max(problem.profile(moves))
    if seed is None:
        assert peak(moved).bytes < peak(step).bytes / 2


def test_with_everything_away_no_more_is_there_than_the_working_set() -> None:
    step = captured("llama")
    problem = build_problem(step, CLUSTER, 0, (HOST,))
    assert max(problem.profile(_moves(problem, None))) == problem.working_set


def test_a_moved_step_can_be_simulated_and_read() -> None:
    step = captured("llama")
    problem = build_problem(step, CLUSTER, 0, (HOST,))
    moved = apply(step, problem, _moves(problem, None))
    timeline = simulate(lower({"all": moved}), CLUSTER)
    assert timeline.peak.bytes == peak(moved).bytes
    out = [span for span in timeline.spans if span.engine == "copy:device>host"]
    stores = [node for node in moved.nodes if node.target is ir.store]
    assert len(out) == len(stores) > 0
    assert "host" in timeline.trace.tiers


def test_what_is_away_may_not_be_read() -> None:
    step = captured("llama")
    problem = build_problem(step, CLUSTER, 0, (HOST,))
    held = next(
        held for held in problem.held if held.kind == "activation" and held.movable and len(held.busy) > 1
    )
    (first, last), *_ = held.gaps(problem.nodes)
    right = Move(held.storage, "host", 0, first, first, last)
    apply(step, problem, [right])
    with pytest.raises(GraphError, match="no memory"):
        apply(step, problem, [Move(held.storage, "host", 0, first, first, last + 1)])
    with pytest.raises(GraphError, match="does not hold"):
        apply(step, problem, [Move(held.storage, "host", 0, None, first, last)])


def test_what_is_being_copied_may_not_be_given_up_or_changed() -> None:
    step = captured("llama")
    flash = OffloadTier("flash", 2**40, Rate(1e-5, 1e9), Rate(1e-5, 1e9))
    problem = build_problem(step, CLUSTER, 0, (HOST, flash))
    read = next(
        held for held in problem.held if held.kind == "activation" and held.movable and len(held.busy) > 2
    )
    (first, last), (then, end), *_ = read.gaps(problem.nodes)
    near = Move(read.storage, "host", 0, first, first, last)
    far = Move(read.storage, "flash", 1, then, then, end)
    apply(step, problem, [near, far])
    # It waits for the copy to the host and not for the one to flash, which reads the same memory.
    with pytest.raises(GraphError, match="gives it up while it is being copied"):
        apply(step, problem, [near, Move(read.storage, "flash", 1, first, then, end)])
    changed = next(held for held in problem.held if held.state and held.movable and held.busy[-1].writes)
    (first, last), *_ = changed.gaps(problem.nodes)
    moved = apply(step, problem, [Move(changed.storage, "host", 0, first, first, last)])
    (begun,) = (node for node in moved.nodes if node.target is ir.store)
    for node in [node for node in moved.nodes if ir.is_cache(node) and node is not begun]:
        moved.graph.erase_node(node)
    with pytest.raises(GraphError, match="while it is being copied"):
        validate(step, moved)
