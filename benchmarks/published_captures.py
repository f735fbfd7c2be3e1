"""Captured steps of published runs on disk, so that a change of prices is judged without capturing anything.

A capture says nothing of time: what is priced differs with the machine and the constants, and the graph does not,
unless a pass searches by prices, whose steps are not kept. A step without a pipeline is kept as its Trace, stages of a
pipeline as their graphs. The key of a capture is the run file, how it is lowered, and the text of the packages that
capture and rewrite steps (`DECIDE`), beside the versions of torch and transformers: what changes one of these captures
anew.

The files are pickles, which run code when they are read: the folder is the user's own.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
from torch import fx

import hyper_parallel
from hyper_parallel.config import RunConfig
from hyper_parallel.estimate import predict, predict_pipeline
from hyper_parallel.graph.step_context import current_step

DECIDE = (
    *(
        "compat",
        "config",
        "graph",
        "layout",
        "offloading",
        "overlap",
        "schedule",
        "shard",
        "step",
        "strategy",
    ),
    *("trace", "workload", "estimate"),
)
"""Packages that decide what is captured."""
_PRICES = (
    *("whole_recompute.py", "stage_price.py", "predict.py", "predict_pipeline.py"),
    *("pipeline_timeline.py", "prediction.py"),
)
"""Files of `estimate` that price what was captured."""


@contextmanager
def kept_in(folder: Path, name: str) -> Iterator[None]:
    """Read what `estimate` captures from a folder, and write there what is not; `name`: of the row, for its files."""
    folder.mkdir(parents=True, exist_ok=True)

    def keeping(capture: Callable[..., Any], about: Callable[..., Any], light: Callable[[Any], Any]) -> Any:
        def captured(*args: Any, **options: Any) -> Any:
            if not _is_free_of_prices(args[1]):
                return capture(*args, **options)
            told = repr((_code(), sorted(current_step().fused), about(*args, **options)))
            key = hashlib.sha256(told.encode())
            path = folder / f"{name.replace(':', '-')}-{key.hexdigest()[:16]}.pickle"
            if path.exists():
                return _read(path)
            found = light(capture(*args, **options))
            _write(path, found)
            return found

        return captured

    with (
        patch.object(predict, "trace_of", keeping(predict.trace_of, _about_trace, lambda found: found)),
        patch.object(
            predict_pipeline,
            "capture_stages",
            keeping(predict_pipeline.capture_stages, _about_stages, _light),
        ),
    ):
        yield


def _is_free_of_prices(config: RunConfig) -> bool:
    """Whether no pass searches an order or a plan by what it costs on a machine."""
    strategy = config.effective_strategy
    fixed = strategy.axes.pipeline > 1 or strategy.overlap.schedule in ("usual", "none")
    return fixed and strategy.memory.device is None


def _about_trace(model: Any, config: RunConfig, classes: Any, **options: Any) -> Any:
    model_type, layers = type(model).__name__, len(list(model.modules()))
    attention = getattr(model.config, "_attn_implementation", None)
    return (
        config.model_dump_json(),
        model_type,
        layers,
        attention,
        len(classes),
        options["fused"],
        options["views"],
    )


def _about_stages(model: Any, config: RunConfig, *_: Any) -> Any:
    attention = getattr(model.config, "_attn_implementation", None)
    return config.model_dump_json(), type(model).__name__, attention


def _light(found: Any) -> Any:
    """Without the model and the plan, which no price needs."""
    for name in ("model", "plan"):
        object.__setattr__(found, name, None)
    return found


@cache
def _code() -> str:
    """Of what decides a capture."""
    root = Path(hyper_parallel.__file__).parent
    digest = hashlib.sha256()
    for package in DECIDE:
        for path in sorted((root / package).rglob("*.py")):
            if package != "estimate" or path.name not in _PRICES:
                digest.update(path.read_bytes())
    for name in ("torch", "transformers"):
        digest.update(importlib.metadata.version(name).encode())
    return digest.hexdigest()


# Graphs


class _Pickler(pickle.Pickler):
    """Writes graphs as lists: pickled as they are, each node leads to the next, and so as deep as the graph is long."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, fx.Graph):
            return _graph, (_records(value),)
        if isinstance(value, fx.Node):
            return _node, (value.graph, _places(value.graph)[value])
        if isinstance(value, torch._ops.OpOverload):
            return _operator, (value._schema.name, value._overloadname)
        if isinstance(value, FunctionType) and "<locals>" in value.__qualname__:
            # Makes a shorter step (`StepGraph.short`), which only a search of orders asks for.
            return _nothing, ()
        return NotImplemented


_PLACES: dict[int, tuple[fx.Graph, dict[fx.Node, int]]] = {}


def _places(graph: fx.Graph) -> dict[fx.Node, int]:
    found = _PLACES.get(id(graph))
    if found is None:
        found = _PLACES[id(graph)] = graph, {node: at for at, node in enumerate(graph.nodes)}
    return found[1]


class _At(int):
    """A node, by its place."""


def _records(graph: fx.Graph) -> list[tuple[Any, ...]]:
    places = _places(graph)

    def flat(node: fx.Node) -> _At:
        return _At(places[node])

    return [
        (
            node.op,
            node.name,
            node.target,
            fx.map_arg(node.args, flat),
            fx.map_arg(node.kwargs, flat),
            {
                key: _At(places[one]) if isinstance(one, fx.Node) and one in places else one
                for key, one in node.meta.items()
            },
        )
        for node in graph.nodes
    ]


def _graph(records: list[tuple[Any, ...]]) -> fx.Graph:
    graph = fx.Graph()
    made: list[fx.Node] = []

    def whole(arg: Any) -> Any:
        if isinstance(arg, _At):
            return made[arg]
        if isinstance(arg, tuple):
            return type(arg)(*map(whole, arg)) if hasattr(arg, "_fields") else tuple(map(whole, arg))
        if isinstance(arg, list):
            return [whole(one) for one in arg]
        if isinstance(arg, dict):
            return {key: whole(one) for key, one in arg.items()}
        return arg

    for op, name, target, args, kwargs, meta in records:
        node = graph.create_node(op, target, whole(args), whole(kwargs), name=name)
        node.meta = dict(meta)
        made.append(node)
    for node in made:
        node.meta = {key: made[one] if isinstance(one, _At) else one for key, one in node.meta.items()}
    graph.__dict__["_kept_nodes"] = made
    return graph


def _node(graph: fx.Graph, place: int) -> fx.Node:
    found: fx.Node = graph.__dict__["_kept_nodes"][place]
    return found


def _nothing() -> None:
    """In the place of what is not written."""


def _operator(name: str, overload: str) -> Any:
    namespace, _, operator = name.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), operator), overload or "default")


def _write(path: Path, value: Any) -> None:
    _PLACES.clear()
    data = io.BytesIO()
    _Pickler(data, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    _PLACES.clear()
    partly = path.with_suffix(".partly")
    partly.write_bytes(data.getvalue())
    partly.replace(path)


def _read(path: Path) -> Any:
    return pickle.loads(path.read_bytes())
