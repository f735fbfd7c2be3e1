"""Values of a node whose arguments have other shapes than when it was captured, by the fake kernels."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from hyper_parallel.compat.fake_kernels import fake_kernel
from hyper_parallel.compat.fake_process_group import fake_mode
from hyper_parallel.graph.ir import Size, Value, flat_values, values_of
from hyper_parallel.graph.period_pattern import Unlike
from hyper_parallel.graph.same_graph import label


def inferred(node: fx.Node, value: Any) -> tuple[Any, dict[int, Size]]:
    """(the node's value, the bytes of each storage that has another size), by the values of its arguments.

    `value`: what it gave for the arguments that it was captured with, where it lies now. Raises Unlike where the node
    gives another number of tensors, or has sizes that depend on the data.
    """
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node)
        found = source.meta["value"][index]
        return Value(found.shape, found.stride, value.dtype, value.device, value.storage), {}
    kernel: Any = fake_kernel(node.target) or node.target
    with fake_mode():
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), _fake)
        result = kernel(*args, **kwargs)
    tensors = [
        one
        for one in (result if isinstance(result, tuple | list) else [result])
        if isinstance(one, torch.Tensor)
    ]
    values = flat_values(value)
    if len(tensors) != len(values):
        raise Unlike(f"{label(node)} gives {len(values)} tensors, and {len(tensors)} of more layers")
    # What lies in memory of an argument lies there still.
    lent = {one.storage for source in node.all_input_nodes for one in values_of(source)}
    sizes: dict[int, Size] = {}
    made = []
    for one, tensor in zip(values, tensors, strict=True):
        made.append(Value(tuple(tensor.shape), tensor.stride(), one.dtype, one.device, one.storage))
        if one.storage not in lent:
            sizes[one.storage] = tensor.untyped_storage().nbytes()
    return _nested(value, iter(made)), sizes


def _nested(value: Any, made: Any) -> Any:
    if isinstance(value, Value):
        return next(made)
    if isinstance(value, tuple | list):
        return type(value)(_nested(one, made) for one in value)
    return value


def _fake(node: fx.Node) -> torch.Tensor:
    value: Any = node.meta.get("value")
    sizes = (*value.shape, *value.stride) if isinstance(value, Value) else (None,)
    if not all(isinstance(size, int) for size in sizes):
        raise Unlike(f"the shape of {label(node)} cannot be inferred again")
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device)
