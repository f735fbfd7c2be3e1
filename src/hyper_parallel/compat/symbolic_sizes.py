"""Sizes that depend on the data: PyTorch's symbolic integers and the expressions behind them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import CleanDiv, FloorDiv


def expression(number: int | torch.SymInt) -> Any:
    """The sympy expression of a number."""
    return number.node.expr if isinstance(number, torch.SymInt) else sympy.Integer(number)


def is_symbolic(number: int | torch.SymInt) -> bool:
    """Whether a number is one that only a run knows."""
    return isinstance(number, torch.SymInt) and isinstance(number.node, SymNode)


def not_negative(number: int | torch.SymInt) -> None:
    """Have a number taken for 0 or more wherever its symbol comes up."""
    torch._check(number >= 0)


def another_symbol(like: torch.SymInt) -> Any:
    """A new symbol for a number, 0 or more, that only a run knows; in the environment of a known one."""
    made = like.node.shape_env.create_unbacked_symint()
    not_negative(made)
    return expression(made)


def substituted(number: int | torch.SymInt, symbols: Mapping[Any, Any]) -> int | torch.SymInt:
    """A number with these symbols in place of others."""
    if not isinstance(number, torch.SymInt):
        return number
    found = expression(number).xreplace(symbols)
    made: torch.SymInt = number.node.shape_env.create_symintnode(found, hint=None)
    return made


def floor_division(found: Any) -> bool:
    """Whether an expression is the quotient of its two arguments, rounded down."""
    return isinstance(found, FloorDiv | CleanDiv)


def fake_mode_with_symbols() -> FakeTensorMode:
    """A fake mode in which numbers read from tensors are symbols. Shapes that are given stay plain numbers."""
    return FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
