"""Random little programs, random rewrites: what a rewrite allows gives the same bits, and what would not is refused."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from hyper_parallel.compat.fx_graph import fake_mode_with_symbols
from hyper_parallel.errors import GraphError
from hyper_parallel.graph import (
    StepGraph,
    capture,
    dependencies,
    executable,
    host,
    phase,
    recompute,
    reorder,
    repeatable,
    validate,
)
from hyper_parallel.graph.host_nodes import HostPoint

Instruction = tuple[str, int, int]
Tensors = dict[str, torch.Tensor]


def _in_place(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    a.mul_(b.mean())
    return []


def _in_place_kept(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    return [a.sub_(b.sum() * 0.25)]


def _two_in_place(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    torch._foreach_add_([a, b], 1.5)
    return []


OPERATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]] = {
    "double": lambda a, b: [a * 2.5],
    "tanh": lambda a, b: [torch.tanh(a)],
    "add": lambda a, b: [a + b.mean()],
    "row": lambda a, b: [a[0]] if a.dim() > 1 else [a[:2]],
    "turn": lambda a, b: [a.t()] if a.dim() == 2 else [a.view(-1)],
    "flat": lambda a, b: [a.view(-1)] if a.is_contiguous() else [a[1:]],
    "halves": lambda a, b: list(a.split(2)),
    "norm": lambda a, b: list(torch.ops.aten.native_layer_norm(a, a.shape[-1:], None, None, 1e-5)[:2]),
    "in place": _in_place,
    "in place, kept": _in_place_kept,
    "two in place": _two_in_place,
    "random": lambda a, b: [a * torch.rand_like(a)],
}


def _run(trace: list[Instruction], turn: int, tensors: Tensors, ask: bool) -> Tensors:
    """The program itself; what is after `turn` is its backward pass."""
    pool = [*tensors.values()]
    for at, (name, i, j) in enumerate(trace):
        with phase("backward" if at >= turn else "forward"):
            if name == "host":
                if ask:
                    host(HostPoint.LOOK, [pool[i % len(pool)].sum()])
                continue
            pool += OPERATORS[name](pool[i % len(pool)], pool[j % len(pool)])
    return {f"out {at}": tensor for at, tensor in enumerate(pool[2:]) if at % 3 == 0}


def _captured(trace: list[Instruction], turn: int) -> StepGraph:
    with fake_mode_with_symbols():
        tensors = {"state": torch.empty(4, 4), "x": torch.empty(4, 4)}
        given = {"state": ("parameter", tensors["state"]), "x": ("input", tensors["x"])}
        return capture(lambda: _run(trace, turn, tensors, ask=True), given)  # type: ignore[arg-type]


def _inputs() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.rand(4, 4, generator=generator) + 0.5 for name in ("state", "x")}


def _same(trace: list[Instruction], turn: int, step: StepGraph) -> bool:
    """Whether a graph of the program gives the bits, and leaves the state, that the program does."""
    mine, theirs = _inputs(), _inputs()
    torch.manual_seed(0)
    expected = {name: tensor.clone() for name, tensor in _run(trace, turn, mine, ask=False).items()}
    torch.manual_seed(0)
    got = executable(step).run(theirs, lambda point, values: None)
    both = [(expected[name], got[name]) for name in expected] + [(mine[name], theirs[name]) for name in mine]
    return all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in both)


def _shuffled(step: StepGraph, seed: int, needs: dict) -> list:  # type: ignore[type-arg]
    """A random order that keeps `needs`."""
    draw = random.Random(seed)
    left = {node: set(before) for node, before in needs.items()}
    order = []
    while left:
        ready = [node for node, before in left.items() if not before]
        node = draw.choice(ready)
        del left[node]
        order.append(node)
        for before in left.values():
            before.discard(node)
    return order


PROGRAMS = st.lists(
    st.tuples(st.sampled_from([*OPERATORS, "host"]), st.integers(0, 40), st.integers(0, 40)),
    min_size=3,
    max_size=16,
)
LONGER = st.lists(
    st.tuples(st.sampled_from([*OPERATORS]), st.integers(0, 40), st.integers(0, 40)), min_size=8, max_size=20
)
SEEDS = st.integers(0, 2**20)


@settings(max_examples=60, deadline=None)
@given(PROGRAMS, SEEDS)
def test_any_order_that_keeps_the_dependencies_gives_the_same_bits(
    trace: list[Instruction], seed: int
) -> None:
    step = _captured(trace, len(trace))
    moved = reorder(step, _shuffled(step, seed, dependencies(step)))
    validate(step, moved)
    assert _same(trace, len(trace), moved)


@settings(max_examples=60, deadline=None)
@given(PROGRAMS, SEEDS)
def test_an_order_that_only_keeps_the_edges_is_right_or_refused(trace: list[Instruction], seed: int) -> None:
    step = _captured(trace, len(trace))
    edges = {node: {n for n in node.all_input_nodes if n.op == "call_function"} for node in step.nodes}
    order = _shuffled(step, seed, edges)
    try:
        moved = reorder(step, order)
    except GraphError:
        return
    assert _same(trace, len(trace), moved)


# A storage that is repeated beside a chosen one was written to later, by what writes to the state too.
_ALONG = (
    [("double", 0, 0)] * 2
    + [("halves", 0, 0), ("norm", 0, 0), ("norm", 1, 0)]
    + [("double", 0, 0)] * 4
    + [("two in place", 0, 8), ("double", 8, 0), ("norm", 14, 0)],
    [
        ("double", 0, 0),
        ("halves", 0, 0),
        ("halves", 0, 0),
        ("in place", 0, 31),
        ("double", 0, 0),
        ("double", 16, 0),
        ("double", 0, 0),
        ("double", 0, 0),
    ],
)


@example(*_ALONG, 0)
@settings(max_examples=50, deadline=None)
@given(LONGER, LONGER, SEEDS)
def test_storages_computed_again_give_the_same_bits(
    forward: list[Instruction], backward: list[Instruction], seed: int
) -> None:
    trace, turn = forward + backward, len(forward)
    step = _captured(trace, turn)
    able = repeatable(step, range(len(step.storages)))
    assume(able)
    chosen = [storage for storage in able if random.Random(seed ^ storage).random() < 0.6]
    again = recompute(step, chosen)
    validate(step, again)
    assert _same(trace, turn, again)
    moved = reorder(again, _shuffled(again, seed, dependencies(again)))
    assert _same(trace, turn, moved)
