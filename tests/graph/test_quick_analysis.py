"""What passes ask of each node is answered quickly, and as the plain definitions answer it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from harness.captured import recipe_of
from harness.equivalence import family_config
from harness.families import FAMILIES
from hyper_parallel.compat.fake_tensors import fake_ranks
from hyper_parallel.compat.fx_graph import another_symbol, append_call, copy_node, expression
from hyper_parallel.graph import StepGraph
from hyper_parallel.graph.costs import Pricer
from hyper_parallel.graph.dependencies import dependencies
from hyper_parallel.graph.dynamic_sizes import Sizes, balanced_sizes, known
from hyper_parallel.graph.ir import is_collective, values_of
from hyper_parallel.graph.memory_effects import effects, reads, touched, writes
from hyper_parallel.step import capture_train_step
from hyper_parallel.step.capture_train_step import MicroBatchShape, capture_one

EXPERTS = {"axes": {"shard": 2, "expert": 2}}


def _step(name: str, layers: int, strategy: dict[str, Any]) -> StepGraph:
    family = {**FAMILIES[name], "num_hidden_layers": layers}
    config = family_config(family, strategy, {})
    with fake_ranks(config.strategy.axes.world, 0):
        return capture_one(recipe_of(family, config), MicroBatchShape(2, 32, False), 1)


@pytest.fixture(scope="module")
def experts() -> StepGraph:
    return _step("mixtral", 2, EXPERTS)


def test_effects_are_what_a_node_touches_reads_and_writes(experts: StepGraph) -> None:
    changed = 0
    for node in experts.nodes:
        assert tuple(map(set, effects(node))) == (touched(node), reads(node), writes(node)), node
        changed += bool(writes(node))
    assert changed > 10


def test_bytes_of_sizes_that_the_data_decide(experts: StepGraph) -> None:
    sizes = balanced_sizes(experts)
    pricer = Pricer(experts, sizes)
    symbolic = 0
    for node in experts.graph.nodes:
        for value in values_of(node):
            assert pricer._of(value).bytes == known(value.bytes, sizes)
            symbolic += isinstance(value.bytes, torch.SymInt)
    assert symbolic > 10


def test_a_sum_of_sizes_adds_them_in_the_order_of_their_numbers() -> None:
    """Not by name, where u10 comes before u9, and layers that are alike add up in different orders."""
    environment, graph = ShapeEnv(), fx.Graph()
    sizes = Sizes(graph)
    numbers = [environment.create_unbacked_symint() for _ in range(12)]
    nodes = [graph.placeholder(f"n{at}") for at in range(12)]
    for number, node in zip(numbers, nodes, strict=True):
        sizes.bind(number, node)
    made = sizes.argument(numbers[10] + numbers[9] + numbers[8])
    assert made.args[1] is nodes[10]
    assert made.args[0].args == (nodes[8], nodes[9])


def test_later_symbols_are_as_the_first() -> None:
    environment = ShapeEnv()
    like = environment.create_unbacked_symint()
    symbols = [another_symbol(like) for _ in range(3)]
    assert [symbol.name for symbol in symbols] == ["u1", "u2", "u3"]
    assert expression(environment.create_unbacked_symint()) == sympy.Symbol("u4", integer=True)
    for symbol in symbols:
        number = environment.create_symintnode(symbol, hint=None)
        assert bool(number >= 0), "known without a guard"
        assert bool(number * _sum(environment, symbols) + 1 > 0)


def _sum(environment: ShapeEnv, symbols: list[Any]) -> Any:
    """The sum of symbols."""
    return environment.create_symintnode(sympy.Add(*symbols), hint=None)


def test_a_split_sequence_is_captured_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last layer are unlike the others, and no capture finds that out."""
    layers: list[int] = []
    own = capture_train_step.capture

    def counting(*given: Any) -> StepGraph:
        found = own(*given)
        layers.append(len({node.meta["region"].layer for node in found.nodes} - {""}))
        return found

    monkeypatch.setattr(capture_train_step, "capture", counting)
    _step("llama", 20, {"axes": {"tensor": 2}, "sequence": True})
    assert layers == [4, 5]


WANTED_NAMES = [
    "mm",
    "mm_1",
    "mm_1",
    "add_7",
    "add",
    "max",
    "max_1",
    "mm_01",
    "a_1_2",
    "_3",
    "add_7",
    "mm_1_1",
    "view_2",
]
GIVEN_NAMES = [
    "mm",
    "mm_1",
    "mm_2",
    "add_7",
    "add",
    "max_1",
    "max_2",
    "mm_01",
    "a_1_2",
    "_3",
    "add_8",
    "mm_1_1",
    "view_2",
]


def test_names_of_calls_and_copies() -> None:
    """Of copies too, whose names are known from the graph before."""
    for _ in range(2):
        ours, theirs = fx.Graph(), fx.Graph()
        for name in WANTED_NAMES:
            append_call(ours, name, torch.ops.aten.neg.default, (), {})
            node = fx.Graph().create_node("call_function", torch.ops.aten.neg.default, name=name)
            copy_node(theirs, node, lambda used: used)
        assert [node.name for node in ours.nodes] == GIVEN_NAMES
        assert [node.name for node in theirs.nodes] == GIVEN_NAMES
        for name in ("mm", "add", "max", "a_1", "view", "_3"):
            assert ours._graph_namespace.create_name(name, None) == theirs._graph_namespace.create_name(
                name, None
            )


def test_names_are_those_that_a_graph_gives_where_it_counts_from_the_last() -> None:
    other, graph = fx.Graph(), fx.Graph()
    numbered = [other._graph_namespace.create_name("mm_5", None) for _ in range(2)]
    if numbered != ["mm_5", "mm_6"]:
        pytest.skip("this release of PyTorch counts names that end with a number from 1")
    names = [graph._graph_namespace.create_name(name, None) for name in WANTED_NAMES]
    assert names == GIVEN_NAMES


def test_collectives_that_are_free_are_not_walked_through_for_each_one(experts: StepGraph) -> None:
    class _Walked(list[fx.Node]):
        walks = 0

        def __iter__(self) -> Iterator[fx.Node]:
            type(self).walks += 1
            return super().__iter__()

        def __contains__(self, node: object) -> bool:
            raise AssertionError("a list is walked through for each node that is looked up")

    free = _Walked(node for node in experts.nodes if is_collective(node))
    assert dependencies(experts, free) == dependencies(experts, frozenset(free))
    assert _Walked.walks == 2
