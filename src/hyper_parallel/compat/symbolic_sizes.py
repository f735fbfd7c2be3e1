"""Sizes that depend on the data: PyTorch's symbolic integers and the expressions behind them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, ValueRangesSLoc, constrain_range
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
    made: torch.SymInt = number.node.shape_env.create_symintnode(found, hint=None)
    return made


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
"""The functions of which sizes are made."""


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
            made: torch.SymInt = self._environment.create_symintnode(found, hint=None)  # type: ignore[assignment]
            self._numbers[key] = made
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
