"""`torch.fx` graphs: nodes appended in a fraction of the time of `Graph.create_node`, and sizes that depend on the data
(PyTorch's symbolic integers and the expressions behind them).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, ValueRangesSLoc, constrain_range
from torch.fx.node import map_arg
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Max, Min
from torch.utils._sympy.symbol import SymT, make_symbol


def expression(number: int | torch.SymInt) -> Any:
    """The sympy expression of a number."""
    return number.node.expr if isinstance(number, torch.SymInt) else sympy.Integer(number)


def is_symbolic(number: int | torch.SymInt) -> bool:
    """Whether a number is one that only a run knows."""
    return isinstance(number, torch.SymInt) and isinstance(number.node, SymNode)


def not_negative(number: int | torch.SymInt) -> None:
    """Have a number taken for 0 or more wherever its symbol comes up."""
    if isinstance(number, torch.SymInt) and number.node.expr.is_Symbol:
        # As `torch._check(number >= 0)`, which takes a hundred times as long.
        constrain_range(number, min=0)
    else:
        torch._check(number >= 0)


def another_symbol(like: torch.SymInt) -> Any:
    """A new symbol for a number, 0 or more, that only a run knows; in the environment of a known one."""
    return _another(like.node.shape_env, at_least_0=True)


def _another(environment: ShapeEnv, *, at_least_0: bool) -> Any:
    """A new symbol for a number that only a run knows.

    The first one is made as PyTorch makes it, which takes some hundred microseconds for stacks and records of each;
    later ones are written into the same tables, with the stack of the first.
    """
    first = _firsts.setdefault(environment, {}).get(at_least_0)
    if first is None:
        made = environment.create_unbacked_symint()
        if at_least_0:
            not_negative(made)
        first = _firsts[environment][at_least_0] = expression(made)
        return first
    symbol = make_symbol(SymT.UNBACKED_INT, environment.unbacked_symint_counter, integer=True)
    environment.unbacked_symint_counter += 1
    environment.counter["create_unbacked_symbol"] += 1
    environment.pending_fresh_unbacked_symbols.append(symbol)
    environment.var_to_stack[symbol] = environment.var_to_stack[first]
    environment.var_to_range[symbol] = environment.var_to_range[first]
    where = environment.var_to_range_sloc[first]
    environment.var_to_range_sloc[symbol] = ValueRangesSLoc(where.lower, where.upper)
    return symbol


_firsts: WeakKeyDictionary[ShapeEnv, dict[bool, Any]] = WeakKeyDictionary()
"""Of each environment the first symbols that were made here: of any number, and of numbers that are 0 or more."""


def substituted(number: int | torch.SymInt, symbols: Mapping[Any, Any]) -> int | torch.SymInt:
    """A number with these symbols in place of others."""
    if not isinstance(number, torch.SymInt):
        return number
    found = expression(number).xreplace(symbols)
    symbol: torch.SymInt = number.node.shape_env.create_symintnode(found, hint=None)
    return symbol


class Substitution:
    """Numbers with some symbols in place of others, each worked out once."""

    def __init__(self, symbols: Mapping[Any, Any]) -> None:
        self._symbols = symbols
        self._made: dict[int, tuple[torch.SymInt, int | torch.SymInt]] = {}
        """By the identity of the number, which is kept."""

    def __call__(self, number: int | torch.SymInt) -> int | torch.SymInt:
        """As of `substituted`."""
        if not self._symbols or not isinstance(number, torch.SymInt):
            return number
        found = self._made.get(id(number))
        if found is None:
            found = self._made[id(number)] = number, substituted(number, self._symbols)
        return found[1]


def floor_division(found: Any) -> bool:
    """Whether an expression is the quotient of its two arguments, rounded down."""
    return isinstance(found, FloorDiv | CleanDiv)


def fake_mode_with_symbols() -> FakeTensorMode:
    """A fake mode in which numbers read from tensors are symbols. Shapes that are given stay plain numbers."""
    return FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)


_FUNCTIONS = {kind.__name__: kind for kind in (sympy.Add, sympy.Mul, sympy.Pow, FloorDiv, CleanDiv, Max, Min)}
"""The functions that sizes are made of."""


def written(found: Any) -> Any:
    """A size's expression as plain data: a number, the name of a symbol, or [function, arguments...].

    Raises ValueError for one that cannot be read again.
    """
    if found.is_Integer:
        return int(found)
    if found.is_Symbol:
        if not _UNBACKED.fullmatch(found.name):
            raise ValueError(f"the size {found} is none that is read from a tensor")
        return found.name
    name = type(found).__name__
    if _FUNCTIONS.get(name) is not type(found):
        raise ValueError(f"the size {found} has the function {name}")
    return [name, *map(written, found.args)]


class SymbolReader:
    """Reads what `written` gave, in a new environment of symbols."""

    def __init__(self, not_negative_ones: Collection[str]) -> None:
        """`not_negative_ones`: names of symbols that are known to be 0 or more."""
        self._environment = ShapeEnv()
        self._named: dict[str, Any] = {}
        """Names to symbols."""
        self._numbers: dict[str, torch.SymInt] = {}
        self._not_negative = frozenset(not_negative_ones)

    def expression(self, data: Any) -> Any:
        """The expression."""
        if isinstance(data, int):
            return sympy.Integer(data)
        if isinstance(data, str):
            found = self._named.get(data)
            return self._symbol(data) if found is None else found
        name, *arguments = data
        # As it was, and not simplified by another version's rules.
        return _FUNCTIONS[name](*map(self.expression, arguments), evaluate=False)

    def number(self, data: Any) -> torch.SymInt:
        """The symbolic number; the same one for the same data."""
        key = repr(data)
        if key not in self._numbers:
            found = self.expression(data)
            symbol: torch.SymInt = self._environment.create_symintnode(found, hint=None)  # type: ignore[assignment]
            self._numbers[key] = symbol
        return self._numbers[key]

    def _symbol(self, name: str) -> Any:
        # The environment numbers its symbols itself.
        while name not in self._named:
            found = _another(self._environment, at_least_0=f"u{len(self._named)}" in self._not_negative)
            self._named[found.name] = found
            if len(self._named) > int(_UNBACKED.fullmatch(name)[1]) + 1:  # type: ignore[index]
                raise ValueError(f"PyTorch calls no size {name}")
        return self._named[name]


_UNBACKED = re.compile(r"u(\d+)")


def append_call(graph: fx.Graph, name: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
    """A `call_function` node at the graph's insert point, whose arguments hold no symbolic numbers.

    What `Graph.create_node` does, without its walk through the arguments in search of these.
    """
    return append_node(graph, name, "call_function", target, args, kwargs)


def append_copy(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """A copy of a node of another graph at this graph's insert point, with its name and its own `meta`.

    `copies`: of the nodes that are its arguments.
    """
    copy_of = copies.__getitem__
    args = map_arg(node.args, copy_of)
    kwargs = map_arg(node.kwargs, copy_of) if node.kwargs else node.kwargs
    copy = append_node(graph, node.name, node.op, node.target, args, kwargs)
    set_meta(copy, dict(node.meta))
    return copy


def copy_node(graph: fx.Graph, node: fx.Node, source_of: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """`graph.node_copy(node, source_of)`, named as PyTorch 2.13 does (`_unique_name`)."""
    args = map_arg(node.args, source_of)
    kwargs = map_arg(node.kwargs, source_of)
    name = _unique_name(graph._graph_namespace, node.name)
    graph._graph_namespace._used_names.discard(name)  # which `create_node` takes itself
    created = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
    created.meta = dict(node.meta)
    return created


def set_meta(node: fx.Node, meta: dict[str, Any]) -> None:
    """`node.meta = meta`, without the graph's tables being written anew, as for any attribute that is set."""
    object.__setattr__(node, "meta", meta)


def append_node(graph: fx.Graph, name: str, op: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
    """A node of any kind at the graph's insert point, as of `append_call`."""
    name = _unique_name(graph._graph_namespace, name)
    node = fx.Node(graph, name, op, target, args, kwargs)
    graph._graph_namespace.associate_name_with_obj(name, node)
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


_numbered: dict[str, tuple[str, int]] = {}
"""Names that end with a number and are legal, to what stands before it, and the number. Passes copy the same names
again and again."""
_MOST = 1 << 20


def _unique_name(namespace: Any, name: str) -> str:
    """What `_Namespace.create_name` of PyTorch 2.13 answers and leaves in the namespace, in less time.

    Of a name that is taken and ends with a number, the next is counted from the last of its base; PyTorch 2.11 counts
    from 1, and answers names that other nodes will be copied with.
    """
    parts = _numbered.get(name)
    if parts is None:
        base, _, number = name.rpartition("_")
        if not (
            base
            and number.isdecimal()
            and number == str(int(number))
            and name.isascii()
            and name.isidentifier()
        ):
            unique: str = namespace.create_name(name, None)
            return unique
        if len(_numbered) >= _MOST:
            _numbered.clear()
        parts = _numbered[name] = base, int(number)
    base, count = parts
    if name in namespace._used_names:
        count = namespace._base_count.get(base, 0)
        while name in namespace._used_names:
            count += 1
            name = f"{base}_{count}"
    namespace._used_names.add(name)
    namespace._base_count[base] = count
    return name
