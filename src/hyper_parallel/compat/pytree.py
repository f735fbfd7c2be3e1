"""Pytrees: nested arguments and results as leaves, Transformers' output classes included."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils import _pytree


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves, and the shape of the tree: hashable, and equal for trees of the same shape."""
    return _pytree.tree_flatten(tree)


def leaves_of(tree: Any) -> list[Any]:
    """The leaves alone."""
    return _pytree.tree_leaves(tree)


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """A tree of the same shape, with what the function makes of each leaf."""
    return _pytree.tree_map(function, tree)


def unflatten(leaves: Iterable[Any], shape: Any) -> Any:
    """The tree of these leaves."""
    return _pytree.tree_unflatten(leaves, shape)
