"""Traces made by hand, and a cluster on which seconds are what is written: 1 FLOP takes 1 s, and so does 1 byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.cluster import Cluster
from hyper_parallel.cluster.device import Device, Link, Tier
from hyper_parallel.trace import Bytes, Collective, Op, Timeline, Trace
from hyper_parallel.workload.work import Work


def toy(*, latency: float = 0.0, slowdown: float = 1.0, network: float = 1.0, **levels: Any) -> Cluster:
    """One FLOP a second, one byte a second on every link; the device's memory costs nothing."""
    memory = Tier("device", 1e15, 1e30, 1e30)
    return Cluster(
        device=Device("toy", {"float32": 1.0}, {"float32": 1.0}, memory, comm_slowdown=slowdown),
        links={"node": Link("node", 1.0, latency), "network": Link("network", network, latency)},
        host=Tier("host", 1e15, 2.0, 1.0),
        pool=Tier("pool", 1e15, 4.0, 4.0),
        source="made up for a test",
        name="toy",
        **levels,
    )


class Ops:
    """Writes the ops of a rank class one after the other; every method gives the op's index."""

    def __init__(self) -> None:
        self.ops: list[Op] = []

    def add(self, name: str, queue: str, after: Sequence[int] = (), **fields: Any) -> int:
        self.ops.append(Op(len(self.ops), name, queue=queue, after=tuple(after), **fields))
        return len(self.ops) - 1

    def kernel(
        self,
        name: str,
        seconds: float,
        *after: int,
        queue: str = "compute",
        kind: str = "matmul",
        **fields: Any,
    ) -> int:
        flops = {"flops" if kind == "matmul" else "vector_flops": seconds}
        return self.add(name, queue, after, work=Work(kind, **flops), **fields)  # type: ignore[arg-type]

    def send(self, name: str, bytes: int, ranks: Sequence[int], *after: int, **fields: Any) -> int:
        """On two ranks a `send`, so that bytes are seconds; else an all-gather, of (n − 1) · bytes seconds."""
        axis = fields.pop("axis", "shard")
        kind = fields.pop("kind", "send" if len(ranks) == 2 else "all_gather")
        call = Collective(kind, tuple(ranks), bytes, axis, fields.pop("tag", ""))
        return self.add(name, fields.pop("queue", f"comm:{axis}"), after, collective=call, **fields)

    def copy(self, name: str, bytes: int, route: str, *after: int, **fields: Any) -> int:
        return self.add(name, f"copy:{route}", after, work=Work("copy", read=bytes, written=bytes), **fields)


def trace(*classes: Ops, ranks: int = 2, resident: Sequence[Bytes] = (), **fields: Any) -> Trace:
    """One class of all `ranks`, or a class of one rank for each that is given."""
    if len(classes) == 1:
        of = dict.fromkeys(range(ranks), "all")
        return Trace({"all": tuple(classes[0].ops)}, of, {"all": tuple(resident)}, **fields)
    names = [f"class {place}" for place in range(len(classes))]
    return Trace(
        {name: tuple(ops.ops) for name, ops in zip(names, classes, strict=True)},
        dict(enumerate(names)),
        **fields,
    )


def one_f_one_b(stages: int, micro_batches: int, forward: float, backward: float) -> Trace:
    """1F1B on equal or unequal stages whose sends take no time: what PipeDream-Flush runs."""
    written = []
    for stage in range(stages):
        ops = Ops()
        last: list[int] = []

        def hop(
            kind: str, batch: int, up: bool, ops: Ops = ops, stage: int = stage, last: list[int] = last
        ) -> None:
            other = stage + (1 if (kind == "send") == up else -1)
            if 0 <= other < stages:
                ranks = (stage, other) if kind == "send" else (other, stage)
                way = "forward" if up else "backward"
                queue = f"comm:{kind} {way}"
                last[:] = [
                    ops.send(f"{kind} {way} {batch}", 0, ranks, *last, tag=way, kind=kind, axis="pipeline",
                             queue=queue, phase=way)
                ]  # fmt: skip

        def run(up: bool, batch: int, ops: Ops = ops, hop: Any = hop, last: list[int] = last) -> None:
            hop("recv", batch, up)
            way = "forward" if up else "backward"
            last[:] = [ops.kernel(f"{way} {batch}", forward if up else backward, *last, phase=way)]
            before = list(last)
            hop("send", batch, up)
            # A send is waited for by nobody here: the next kernel follows the one before.
            last[:] = before

        warm = min(stages - stage - 1, micro_batches)
        for batch in range(warm):
            run(True, batch)
        for batch in range(micro_batches - warm):
            run(True, warm + batch)
            run(False, batch)
        for batch in range(micro_batches - warm, micro_batches):
            run(False, batch)
        written.append(ops)
    return trace(*written, micro_batches=micro_batches)


def times(timeline: Timeline, name: str = "all") -> dict[str, tuple[float, float]]:
    """(start, end) of the ops of a class, by name."""
    return {span.op.name: (span.start, span.end) for span in timeline.of(name)}
