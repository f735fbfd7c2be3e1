"""A Timeline as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing, in the Trace Event Format.

Each rank class is a process, each engine and queue a track in it. A collective's wait for other ranks is a separate
slice before it. Flows lead from a collective to the first op that waits for it. Counters hold the bytes alive by tier
and kind. Times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from hyper_parallel.report.sheets import describe_ranks, heading
from hyper_parallel.trace import Op, Span, Timeline, is_comm, is_compute

Event = dict[str, Any]


def perfetto(timeline: Timeline) -> str:
    """The trace as JSON text. Its process names and its metadata say `predicted` or `measured`."""
    events: list[Event] = []
    flows = 0
    for pid, name in enumerate(timeline.trace.ops, 1):
        spans = timeline.of(name)
        tracks = lanes(spans)
        title = f"{timeline.word} · {name} · ranks {describe_ranks(timeline, name)}"
        events += _metadata(pid, title, tracks)
        numbers = {track: tid for tid, track in enumerate(tracks, 1)}
        events += _slices(pid, spans, numbers)
        found = list(_flows(pid, spans, numbers, flows))
        flows += len(found) // 2
        events += found
        events += _counters(timeline, pid, name)
    figures = {"step_seconds": timeline.step, "mfu": timeline.mfu, "exposed_seconds": timeline.exposed}
    about = {"what": heading(timeline), "predicted": timeline.predicted, "cluster": timeline.cluster,
             "source": timeline.source, **figures}  # fmt: skip
    return json.dumps(
        {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events},
        separators=(",", ":"),
        allow_nan=False,
    )


def lanes(spans: Sequence[Span]) -> list[str]:
    """The engines and queues with ops that take time: kernels first, then collectives, then copies."""
    busy = {span.engine for span in spans if _shown(span)}
    return sorted(busy, key=lambda lane: (lane != "matrix", lane != "vector", not is_comm(lane), lane))


def _shown(span: Span) -> bool:
    """Whether the span takes time or waits for other ranks."""
    return span.end > (span.ready if is_comm(span.op.queue) else span.start)


def _metadata(pid: int, name: str, tracks: Sequence[str]) -> Iterator[Event]:
    def event(what: str, tid: int, **args: object) -> Event:
        return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}

    yield event("process_name", 0, name=name)
    yield event("process_sort_index", 0, sort_index=pid)
    for tid, track in enumerate(tracks, 1):
        yield event("thread_name", tid, name=track)
        yield event("thread_sort_index", tid, sort_index=tid)


def _slices(pid: int, spans: Sequence[Span], numbers: dict[str, int]) -> Iterator[Event]:
    for span in spans:
        if not _shown(span):
            continue
        op, tid = span.op, numbers[span.engine]
        if op.collective and span.start > span.ready:
            yield _slice(pid, tid, "waits for other ranks", "wait", span.ready, span.start, {"for": op.name})
        if span.end > span.start:
            yield _slice(pid, tid, op.name, op.part or "none", span.start, span.end, described(op))


def _slice(
    pid: int, tid: int, name: str, category: str, start: float, end: float, args: dict[str, object]
) -> Event:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": category, "ts": start * 1e6,
            "dur": (end - start) * 1e6, "args": args}  # fmt: skip


def described(op: Op) -> dict[str, object]:
    """The non-empty attributes of an op, by name."""
    found: dict[str, object] = {"op": op.index, "module": op.module, "phase": op.part, "queue": op.queue}
    if op.work is not None:
        work = op.work
        found |= {"kind": work.kind, "dtype": work.dtype, "shape": "×".join(map(str, work.shape)),
                  "flops": work.flops + work.vector_flops, "bytes": work.read + work.written}  # fmt: skip
    elif op.collective is not None:
        call = op.collective
        found |= {
            "kind": call.kind,
            "axis": call.axis,
            "ranks": len(call.ranks),
            "bytes": call.bytes,
            "tag": call.tag,
        }
    return {name: value for name, value in found.items() if value not in ("", 0) or name == "op"}


def _flows(pid: int, spans: Sequence[Span], numbers: dict[str, int], known: int) -> Iterator[Event]:
    """A flow from each collective to the first kernel or copy that waits for it, through ops that take no time."""
    behind: dict[int, tuple[int, ...]] = {}
    met: set[int] = set()
    by_index = {span.op.index: span for span in spans}
    for span in spans:
        calls: dict[int, None] = {}
        for index in span.op.after:
            before = by_index.get(index)
            if before is None:
                continue
            if before.op.collective is not None:
                calls[index] = None
            elif before.end == before.start:
                calls.update(dict.fromkeys(behind[index]))
        behind[span.op.index] = tuple(calls)
        if span.end == span.start or not (is_compute(span.op.queue) or span.op.queue.startswith("copy:")):
            continue
        for index in calls:
            call = by_index[index]
            if index not in met and call.end > call.start:
                met.add(index)
                common = {"pid": pid, "name": "waited for", "cat": "wait", "id": known + len(met)}
                yield {"ph": "s", "tid": numbers[call.engine], "ts": call.start * 1e6, **common}
                yield {"ph": "f", "bp": "e", "tid": numbers[span.engine], "ts": span.start * 1e6, **common}


def _counters(timeline: Timeline, pid: int, name: str) -> Iterator[Event]:
    for tier in timeline.trace.tiers:
        curve = timeline.memory(name, tier)
        rows = zip(*curve.by_kind.values(), strict=True)
        last: tuple[float, tuple[int, ...]] | None = None
        for time, row in zip(curve.times, rows, strict=False):
            # Of several values at one time a counter shows one: the last.
            if last and last[0] != time:
                yield _counter(pid, tier, last[0], dict(zip(curve.by_kind, last[1], strict=True)))
            last = (time, row)
        if last:
            yield _counter(pid, tier, last[0], dict(zip(curve.by_kind, last[1], strict=True)))


def _counter(pid: int, tier: str, time: float, values: dict[Any, int]) -> Event:
    return {"ph": "C", "pid": pid, "tid": 0, "name": f"{tier} memory", "ts": time * 1e6, "args": values}
