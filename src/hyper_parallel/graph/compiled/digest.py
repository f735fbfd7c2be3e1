"""The name of a region's artifact: a digest of all that the code made for it depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from hyper_parallel.graph.compiled.regions import Region
from hyper_parallel.graph.ir import Value, values_of


def digest(region: Region, environment: Mapping[str, str]) -> str:
    """32 hexadecimal digits. Regions of the same operators on tensors of the same kind have the same one, wherever in
    a step they are and whatever its nodes are called."""
    content = json.dumps([text(region), sorted(environment.items())])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def text(region: Region) -> str:
    """A line for each input, operator and output: shapes, strides, dtypes, devices, numbers; nodes by their place."""
    graph = region.graph()
    places = {node: f"%{at}" for at, node in enumerate(graph.nodes)}
    given = iter(region.inputs)
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            lines.append(" ".join(_tensor(value) for value in values_of(next(given))))
        else:
            lines.append(f"{node.target} {_argument(node.args, places)} {_argument(node.kwargs, places)}")
    return "\n".join(lines)


def _tensor(value: Value) -> str:
    return f"{value.dtype}{list(value.shape)}{list(value.stride)}{value.device}"


def _argument(value: Any, places: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return places[value]
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_argument(x, places)}' for key, x in sorted(value.items()))}}}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(_argument(x, places) for x in value)}]"
    return f"{type(value).__name__} {value!r}"
