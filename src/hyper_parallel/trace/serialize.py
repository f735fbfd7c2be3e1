"""Traces and Timelines as JSON, both ways, exactly.

The format is compact: repeated values (names, works, calls, groups of ranks) are stored once in a table and referred to
by index, an op is a row, and default values are left out. Floats round-trip exactly.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from hyper_parallel.errors import TraceError
from hyper_parallel.trace.timeline import Alone, Timeline
from hyper_parallel.trace.trace import Bytes, Collective, Op, Span, Trace
from hyper_parallel.workload.work import Work

VERSION = 1
"""Version of the format. A file of another version is refused."""

T = TypeVar("T", bound=Hashable)
R = TypeVar("R")


class _Table(Generic[T]):
    """Values by index, in order of first use."""

    def __init__(self) -> None:
        self.numbers: dict[T, int] = {}

    def number(self, value: T) -> int:
        return self.numbers.setdefault(value, len(self.numbers))


def dump_trace(trace: Trace) -> str:
    """A Trace as one line of JSON."""
    return _text({"program": _trace(trace)})


def load_trace(text: str) -> Trace:
    """The Trace that `dump_trace` wrote. Raises TraceError for any other text."""
    return _read(text, lambda data: _load_trace(data["program"]))


def dump_timeline(timeline: Timeline) -> str:
    """A Timeline, its Trace included, as one line of JSON."""
    engines: _Table[str] = _Table()
    rows = [
        [
            engines.number(span.engine),
            span.start,
            span.end,
            *([span.ready] if span.ready != span.start else []),
        ]
        for span in timeline.spans
    ]
    names = list(timeline.trace.ops)
    classes = [names.index(timeline.trace.classes[span.rank]) for span in timeline.spans]
    return _text(
        {
            "program": _trace(timeline.trace),
            "timeline": {
                **{name: getattr(timeline, name) for name in _PLAIN},
                "alone": dataclasses.astuple(timeline.alone) if timeline.alone else None,
                "capacity": dict(timeline.capacity),
                "engines": list(engines.numbers),
                "ops": [[place, span.op.index] for place, span in zip(classes, timeline.spans, strict=True)],
                "spans": rows,
            },
        }
    )


def load_timeline(text: str) -> Timeline:
    """The Timeline that `dump_timeline` wrote. Raises TraceError for any other text."""
    return _read(text, _load_timeline)


_PLAIN = ("predicted", "device", "cluster", "source", "peak_flops")
"""Fields of a Timeline that are stored as plain JSON values."""


def _text(data: dict[str, Any]) -> str:
    return json.dumps({"version": VERSION, **data}, separators=(",", ":"), allow_nan=False)


def _read(text: str, build: Callable[[dict[str, Any]], R]) -> R:
    try:
        data = json.loads(text)
        version = data["version"]
        if version == VERSION:
            return build(data)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise TraceError(
            f"not a trace or timeline of this form ({type(error).__name__}: {error}); give a file that "
            "hyper-parallel wrote"
        ) from error
    raise TraceError(
        f"the file's form is version {version}, and this release reads version {VERSION}; write it again"
    )


def _trace(trace: Trace) -> dict[str, Any]:
    names: _Table[str] = _Table()
    works: _Table[Work] = _Table()
    groups: _Table[tuple[int, ...]] = _Table()
    calls: _Table[tuple[int | str, ...]] = _Table()
    known: dict[int, int] = {}

    def group(ranks: tuple[int, ...]) -> int:
        # Groups may be long and are mostly the same object: they are hashed once.
        if id(ranks) not in known:
            known[id(ranks)] = groups.number(ranks)
        return known[id(ranks)]

    def held(one: Bytes) -> list[int | str]:
        row = [one.storage, one.bytes, names.number(one.kind), names.number(one.tier), names.number(one.name)]
        return row if one.name else row[:4]  # type: ignore[return-value]

    def row(op: Op) -> list[Any]:
        call = op.collective
        what: Any = 0
        if op.work is not None:
            what = [works.number(op.work)]
        elif call is not None:
            what = -1 - calls.number((call.kind, group(call.ranks), call.bytes, call.axis, call.tag))
        full = [
            *(names.number(text) for text in (op.name, op.module, op.phase, op.queue)),
            what,
            op.after,
            [held(one) for one in op.allocates],
            op.frees,
            int(op.recomputed),
        ]
        while len(full) > 5 and not full[-1]:
            full.pop()
        return full

    data: dict[str, Any] = {
        "model_flops": trace.model_flops,
        "micro_batches": trace.micro_batches,
        "classes": {
            name: _runs([rank for rank, of in sorted(trace.classes.items()) if of == name])
            for name in trace.ops
        },
        "resident": {name: [held(one) for one in of] for name, of in trace.resident.items()},
        "ops": {name: [row(op) for op in ops] for name, ops in trace.ops.items()},
    }
    # The tables are complete only when all rows are written.
    data["names"] = list(names.numbers)
    data["works"] = [_changed(work) for work in works.numbers]
    data["calls"] = list(calls.numbers)
    data["groups"] = [_runs(ranks) for ranks in groups.numbers]
    return data


def _load_trace(data: dict[str, Any]) -> Trace:
    names = data["names"]
    works = [Work(**{**work, "shape": tuple(work.get("shape", ()))}) for work in data["works"]]
    groups = [tuple(_unrun(runs)) for runs in data["groups"]]
    calls = [Collective(kind, groups[of], count, axis, tag) for kind, of, count, axis, tag in data["calls"]]

    def held(row: Sequence[int]) -> Bytes:
        storage, count, kind, tier, *name = row
        return Bytes(storage, count, names[kind], names[tier], names[name[0]] if name else "")

    def op(index: int, row: Sequence[Any]) -> Op:
        name, module, phase, queue, what, *rest = row
        left_out: tuple[Any, ...] = ([], [], [], 0)
        after, allocates, frees, recomputed = (*rest, *left_out[len(rest) :])
        return Op(
            index,
            names[name],
            names[module],
            names[phase],
            names[queue],
            work=works[what[0]] if isinstance(what, list) else None,
            collective=calls[-1 - what] if isinstance(what, int) and what < 0 else None,
            after=tuple(after),
            allocates=tuple(held(one) for one in allocates),
            frees=tuple(frees),
            recomputed=bool(recomputed),
        )

    trace = Trace(
        {name: tuple(op(index, row) for index, row in enumerate(rows)) for name, rows in data["ops"].items()},
        {rank: name for name, runs in data["classes"].items() for rank in _unrun(runs)},
        {name: tuple(held(one) for one in of) for name, of in data["resident"].items()},
        data["model_flops"],
        data["micro_batches"],
    )
    trace.check()
    return trace


def _load_timeline(data: dict[str, Any]) -> Timeline:
    trace = _load_trace(data["program"])
    written = data["timeline"]
    names = list(trace.ops)
    spans = []
    for (place, index), (engine, start, end, *ready) in zip(written["ops"], written["spans"], strict=True):
        op = trace.ops[names[place]][index]
        rank = trace.first(names[place])
        spans.append(Span(rank, written["engines"][engine], start, end, op, ready[0] if ready else start))
    alone_of = partial(Alone, *written["alone"]) if written["alone"] else None
    return Timeline(
        trace,
        tuple(spans),
        alone_of=alone_of,
        capacity=written["capacity"],
        **{name: written[name] for name in _PLAIN},
    )


def _changed(work: Work) -> dict[str, Any]:
    """A Work's fields that are not at their defaults."""
    return {
        field.name: getattr(work, field.name)
        for field in dataclasses.fields(work)
        if getattr(work, field.name) != field.default
    }


def _runs(ranks: Sequence[int]) -> list[list[int]]:
    """Ranks as [first, count, step], so that a group of thousands is a few numbers.

    >>> _runs([0, 8, 16, 17, 3])
    [[0, 3, 8], [17, 2, -14]]
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs:
            first, count, step = runs[-1]
            if count == 1 or rank == first + count * step:
                runs[-1] = [first, count + 1, rank - first if count == 1 else step]
                continue
        runs.append([rank, 1, 0])
    return runs


def _unrun(runs: Iterable[Sequence[int]]) -> list[int]:
    return [first + place * step for first, count, step in runs for place in range(count)]
