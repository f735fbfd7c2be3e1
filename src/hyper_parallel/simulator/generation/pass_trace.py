"""Trace of passes of generation for the discrete-event engine, with what lies in tiers as copies on the link's queue.

Kernels and collectives run in the order of the model's code, and each collective is waited for. Copies follow one
another on the queue `copy:<tier>>device`:

- weights of a streamed layer begin when the streamed layer `BUFFERS` before it has ended, whose buffer they take; the
  layer's first operator waits for them;
- a layer's contexts begin when attention `BUFFERS` layers before has ended (what sparse attention selects: when the
  layer before has begun, from whose hidden state it is guessed); attention waits for them;
- experts that were chosen begin behind the router, and the experts' products wait for them, or experts on the host
  compute beside the device, and what follows the experts waits for them.

Rows that a pass adds to contexts in a tier go there behind attention on the queue of the other direction, and are not
waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.simulator.generation.pass_cost import PassPricer
from hyper_parallel.simulator.generation.pass_model import Layer, PassLoad, PassOp, works
from hyper_parallel.simulator.generation.tier_split import BUFFERS
from hyper_parallel.simulator.simulate import simulate
from hyper_parallel.trace import Op, Timeline, Trace
from hyper_parallel.workload.work import Work

_ALL = "all"


@dataclass(frozen=True)
class SimulatedPasses:
    """Equal passes, one behind the other."""

    timeline: Timeline
    ends: tuple[float, ...]
    """When each pass ended, in seconds."""

    @property
    def first(self) -> float:
        """Seconds of the first pass, whose first copies run beside nothing."""
        return self.ends[0]

    @property
    def steady(self) -> float:
        """Seconds of a pass behind an equal one."""
        return self.ends[-1] - self.ends[-2] if len(self.ends) > 1 else self.ends[0]


def simulated(pricer: PassPricer, load: PassLoad, passes: int = 0) -> SimulatedPasses:
    """Simulate equal passes; left out, two where a pass reads of a tier, else one."""
    count = passes or (2 if reads_tiers(pricer, load) else 1)
    writer = _Writer(pricer, load)
    last = [writer.one_pass() for _ in range(count)]
    ranks = pricer.model.world
    trace = Trace({_ALL: tuple(writer.ops)}, dict.fromkeys(range(ranks), _ALL))
    timeline = simulate(trace, pricer.cluster, masking=False)
    ends = {span.op.index: span.end for span in timeline.spans}
    return SimulatedPasses(timeline, tuple(ends[at] for at in last))


def reads_tiers(pricer: PassPricer, load: PassLoad) -> bool:
    """Whether a pass copies anything."""
    if not (pricer.split.any or pricer.selects):
        return False
    costs = {kind: pricer.layer(at, load) for at, kind in enumerate(pricer.model.order)}
    return bool(pricer.split.layers) or any(one.contexts or one.experts or one.host for one in costs.values())


class _Writer:
    """Writes the ops of passes of one rank."""

    def __init__(self, pricer: PassPricer, load: PassLoad) -> None:
        self.ops: list[Op] = []
        self._pricer, self._load = pricer, load
        self._touched = pricer.touched_here(load)
        self._streamed = pricer.split.streamed(pricer.model)
        self._last = -1
        """The last op on the compute queue."""
        self._waits: set[int] = set()
        """What the next op waits for."""
        self._used: list[int] = []
        self._attended: list[int] = []
        self._begun = -1
        """The first op of the layer before."""
        self._works: dict[tuple[int, int], Work] = {}

    def one_pass(self) -> int:
        """A pass; the index of its last op."""
        model = self._pricer.model
        entry = self._last
        self._begun = entry
        for op in model.before:
            self._run(op)
        for at, kind in enumerate(model.order):
            self._layer(at, model.kinds[kind], entry)
        for op in model.after:
            self._run(op)
        return self._last

    def _layer(self, at: int, layer: Layer, entry: int) -> None:
        cost = self._pricer.layer(at, self._load)
        if cost.weights:
            free = self._used[-BUFFERS] if len(self._used) >= BUFFERS else -1
            self._waits.add(self._copy("weights", cost.weights, free, at))
        arrived = -1
        first = len(self.ops)
        if cost.contexts:
            free = self._attended[-BUFFERS] if len(self._attended) >= BUFFERS else -1
            since = max(free, self._begun if self._pricer.selects else entry)
            arrived = self._copy("contexts", cost.contexts, since, at)
        behind: set[int] = set()
        for op in layer.ops:
            module = f"layers.{at}.{op.module}" if op.module else f"layers.{at}"
            if op.role == "attention":
                if arrived >= 0:
                    self._waits.add(arrived)
                assert layer.attention is not None
                for work in works(self._load, layer.attention, self._pricer.sparse.selected):
                    self._write(op.name, module, "compute", work)
                if cost.contexts:
                    self._attended.append(self._last)
                    self._store(layer, at)
                continue
            if op.role == "experts" and cost.experts and not behind:
                behind.add(self._copy("experts", cost.experts, self._last, at))
                self._waits |= behind
            elif op.role == "experts" and cost.host and not behind:
                away = self._pricer.split.away(self._pricer.model, layer) * self._pricer.fetched(self._load)
                work = Work("optimizer", read=away, op="experts")
                behind.add(self._write("experts on the host", module, "host", work, after=(self._last,)))
            self._run(op, module)
        if cost.host:
            self._waits |= behind
        self._begun = first
        if cost.weights:
            self._used.append(self._last)

    def _run(self, op: PassOp, module: str = "") -> None:
        load = self._load
        if op.collective is not None:
            call = op.call(load.rows, load.answers)
            after = {*self._waits, *({self._last} if self._last >= 0 else set())}
            self._waits = {
                self._add(
                    Op(0, op.name, module, "forward", f"comm:{call.axis}", None, call, tuple(sorted(after)))
                )
            }
            # What comes next waits for it.
            self._write("wait", module, "compute", None)
            return
        self._write(op.name, module, "compute", op.work(load.rows, load.answers, self._touched))

    def _copy(self, name: str, size: float, since: int, at: int) -> int:
        work = Work("copy", read=size, op="copy")
        queue = f"copy:{self._pricer.split.tier}>device"
        return self._write(name, f"layers.{at}", queue, work, after=(since,) if since >= 0 else ())

    def _store(self, layer: Layer, at: int) -> None:
        assert layer.attention is not None
        size = self._load.tokens * layer.attention.token * max(self._pricer.split.contexts, self._selected)
        work = Work("copy", read=size, op="copy")
        self._write(
            "contexts", f"layers.{at}", f"copy:device>{self._pricer.split.tier}", work, after=(self._last,)
        )

    @property
    def _selected(self) -> float:
        return 1.0 if self._pricer.selects else 0.0

    def _write(
        self, name: str, module: str, queue: str, work: Work | None, after: tuple[int, ...] = ()
    ) -> int:
        if queue == "compute":
            after = tuple(sorted({*after, *self._waits}))
            self._waits = set()
        own = self._add(Op(0, name, module, "forward", queue, work, None, after))
        if queue == "compute":
            self._last = own
        return own

    def _add(self, op: Op) -> int:
        index = len(self.ops)
        self.ops.append(Op(index, op.name, op.module, op.phase, op.queue, op.work, op.collective, op.after))
        return index
