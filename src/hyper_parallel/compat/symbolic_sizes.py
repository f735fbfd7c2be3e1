"""Sizes that depend on the data: PyTorch's symbolic integers and the expressions behind them."""

from __future__ import annotations

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


def floor_division(found: Any) -> bool:
    """Whether an expression is the quotient of its two arguments, rounded down."""
    return isinstance(found, FloorDiv | CleanDiv)


def fake_mode_with_symbols() -> FakeTensorMode:
    """A fake mode in which numbers read from tensors are symbols. Shapes that are given stay plain numbers."""
    return FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
