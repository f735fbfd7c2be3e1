"""Nested arguments: what is a leaf, what is kept of the shape."""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers.modeling_outputs import BaseModelOutput

from hyper_parallel.compat.dispatch import flatten, leaves_of, mapped, unflatten


class _Pair(NamedTuple):
    first: int
    second: int | None


def test_leaves_come_in_the_order_of_the_arguments_and_go_back_to_their_places() -> None:
    tree = ([1, (2, "three")], {"four": _Pair(4, None)})
    leaves, shape = flatten(tree)
    assert leaves == leaves_of(tree) == [1, 2, "three", 4, None]
    assert unflatten(leaves, shape) == tree
    assert flatten(([5, (6, "")], {"four": _Pair(0, 0)}))[1] == shape
    assert flatten(([5, 6], {}))[1] != shape


def test_a_tree_keeps_its_shape_whatever_its_leaves_become() -> None:
    seen = mapped(lambda leaf: leaf is None, ([1], {"a": _Pair(4, None)}))
    assert seen == ([False], {"a": _Pair(False, True)})
    assert isinstance(seen[1]["a"], _Pair)


def test_an_output_of_transformers_is_a_tree() -> None:
    hidden = torch.zeros(2)
    made = mapped(lambda leaf: leaf + 1, BaseModelOutput(last_hidden_state=hidden))
    assert isinstance(made, BaseModelOutput)
    assert torch.equal(made.last_hidden_state, torch.ones(2))
