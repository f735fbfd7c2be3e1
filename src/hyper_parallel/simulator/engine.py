"""Discrete-event engine that executes a Trace.

The events are: an op becomes ready, a kernel ends, a transfer's latency is over, a transfer's leg ends. Between two
events every rate is constant, so that remaining work falls linearly:

    left(t) = left(t₀) − rate · (t − t₀)          end = t₀ + left / rate

- An op is ready when the op before it in its queue, and all ops that it waits for, have ended.
- A kernel occupies the matrix or the vector engine. Beside a collective its rate is 1 / `comm_slowdown`, else 1.
- Where the host takes time to enqueue an op, it starts no sooner than that (`simulator.host_queue`).
- A collective starts when it is ready in all classes of its ranks. Collectives and copies run at max-min fair rates
  (`simulator.host_queue`) on the link levels and tiers of the devices that they use. Links carry as much in both
  directions at once: a `send` uses its device's way out, a `recv` the way in, every other collective both.

Simultaneous events run in the order in which they were scheduled, so that a simulation is reproducible.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import Literal

from hyper_parallel.errors import TraceError
from hyper_parallel.simulator.host_queue import HostQueue, Resource, Sharing, is_waited_for
from hyper_parallel.simulator.op_costs import Costs, Leg
from hyper_parallel.trace import Op, Span, Trace, copy_tiers, is_compute
from hyper_parallel.trace.trace import Meeting, meetings

Only = Literal["compute", "comm"]

_KERNEL, _CALL, _COPY, _HOST = range(4)


class _Transfer:
    """A running collective or copy."""

    __slots__ = ("at", "left", "legs", "ops", "rate", "since", "ticket")

    def __init__(self, ops: list[int], legs: tuple[Leg, ...]) -> None:
        self.ops = ops
        """The ops that end with it, one of each class."""
        self.legs = legs
        self.at = -1
        """The current leg."""
        self.left = 0.0
        self.rate = 0.0
        self.since = 0.0
        self.ticket = 0
        """Its latest scheduled event; earlier ones are void."""


class _Kernel:
    """A running kernel."""

    __slots__ = ("left", "op", "rate", "since", "ticket")

    def __init__(self, op: int, left: float, rate: float, since: float) -> None:
        self.op = op
        self.left = left
        self.rate = rate
        self.since = since
        self.ticket = 0


@dataclass(slots=True)
class _Engine:
    """The matrix or the vector engine of a class."""

    running: _Kernel | None
    waiting: deque[int]


class Run:
    """One simulation of a Trace. Ops of all classes are numbered consecutively."""

    def __init__(self, trace: Trace, costs: Costs, only: Only | None = None) -> None:
        self._trace, self._costs, self._only = trace, costs, only
        self._slowed = 1.0 / max(1.0, costs.device.comm_slowdown)
        self._ops: list[Op] = []
        self._class: list[int] = []
        self._kind: list[int] = []
        self._runs_on: list[str] = []
        """The engine or queue of each op."""
        self._pending: list[int] = []
        self._then: list[list[int]] = []
        """The ops that wait for each op."""
        self._meeting: dict[int, Meeting] = {}
        self._number(meetings(trace))
        self._directed = any(op.collective is not None and op.collective.paired for op in self._ops)
        device = costs.device
        launch = device.host_launch if only != "comm" else 0.0
        self._host = HostQueue(trace.ops.values(), launch, device.host_kernels) if launch else None
        count = len(self._ops)
        self._ready, self._start, self._end = [-1.0] * count, [-1.0] * count, [-1.0] * count
        self._engines = [(_Engine(None, deque()), _Engine(None, deque())) for _ in trace.ops]
        self._sending = [0] * len(trace.ops)
        """Number of running collectives of each class."""
        self._arrived: dict[Meeting, list[int]] = {}
        self._sharing: Sharing[_Transfer] = Sharing()
        self._events: list[tuple[float, int, _Kernel | _Transfer | int]] = []
        self._turns: deque[int] = deque()
        self._ticket = 0
        self._now = 0.0

    def _number(self, met: dict[str, dict[int, Meeting]]) -> None:
        queues = _Queues()
        for place, (name, ops) in enumerate(self._trace.ops.items()):
            base = len(self._ops)
            last: dict[str, int] = {}
            for op in ops:
                number = base + op.index
                self._ops.append(op)
                self._class.append(place)
                kind, engine = queues.of(op)
                self._kind.append(kind)
                self._runs_on.append(engine)
                self._then.append([])
                ahead = last.get(op.queue)
                self._pending.append(len(op.after) + (ahead is not None))
                if ahead is not None:
                    self._then[ahead].append(number)
                for other in op.after:
                    self._then[base + other].append(number)
                last[op.queue] = number
            self._meeting.update((base + index, meeting) for index, meeting in met[name].items())

    def spans(self) -> tuple[Span, ...]:
        """When each op ran. Raises TraceError if the ops wait in a circle."""
        turns, events = self._turns, self._events
        turns.extend(number for number, pending in enumerate(self._pending) if not pending)
        while True:
            while turns:
                self._turn(turns.popleft())
            if not events:
                break
            self._now, ticket, what = heapq.heappop(events)
            if type(what) is int:
                if what < 0:
                    self._begin(~what)
                else:
                    self._finish(what)
            elif what.ticket == ticket:  # type: ignore[union-attr]
                if type(what) is _Kernel:
                    self._kernel_ends(what)
                else:
                    self._transfer_goes_on(what)  # type: ignore[arg-type]
        if any(end < 0 for end in self._end):
            raise TraceError(self._circle())
        firsts = [self._trace.first(name) for name in self._trace.ops]
        return tuple(
            Span(firsts[place], engine, start, end, op, ready)
            for place, engine, op, start, end, ready in zip(
                self._class, self._runs_on, self._ops, self._start, self._end, self._ready, strict=True
            )
        )

    def _turn(self, number: int) -> None:
        """Handle an op that waits for no other one."""
        if self._host is not None and (enqueued := self._host.enqueued(number)) > self._now:
            self._foresee(enqueued, ~number)
        else:
            self._begin(number)

    def _begin(self, number: int) -> None:
        """Handle an op that is ready."""
        self._ready[number] = self._now
        kind = self._kind[number]
        if kind == _KERNEL:
            engine = self._engines[self._class[number]][self._runs_on[number] == "matrix"]
            if engine.running is None:
                self._kernel_starts(number, engine)
            else:
                engine.waiting.append(number)
        elif kind == _CALL:
            self._comes(number)
        elif kind == _COPY:
            legs = self._costs.copy(self._ops[number]) if self._only is None else ()
            self._transfer_starts([number], legs)
        else:
            self._start[number] = self._now
            seconds = self._costs.seconds(self._ops[number]) if self._only != "comm" else 0.0
            if seconds:
                self._foresee(self._now + seconds, number)
            else:
                self._finish(number)

    def _finish(self, number: int) -> None:
        """Handle an op's end: ops that wait only for it become ready."""
        self._end[number] = self._now
        if self._host is not None and is_waited_for(self._ops[number]):
            self._host.wait(number, self._now)
        pending = self._pending
        for other in self._then[number]:
            pending[other] -= 1
            if not pending[other]:
                self._turns.append(other)

    def _foresee(self, time: float, what: _Kernel | _Transfer | int) -> None:
        self._ticket += 1
        if type(what) is not int:
            what.ticket = self._ticket  # type: ignore[union-attr]
        heapq.heappush(self._events, (time, self._ticket, what))

    # Kernels

    def _kernel_starts(self, number: int, engine: _Engine) -> None:
        self._start[number] = now = self._now
        seconds = self._costs.seconds(self._ops[number]) if self._only != "comm" else 0.0
        if not seconds:
            self._finish(number)
            return
        rate = self._slowed if self._sending[self._class[number]] else 1.0
        engine.running = kernel = _Kernel(number, seconds, rate, now)
        self._foresee(now + seconds / rate, kernel)

    def _kernel_ends(self, kernel: _Kernel) -> None:
        number = kernel.op
        engine = self._engines[self._class[number]][self._runs_on[number] == "matrix"]
        engine.running = None
        self._finish(number)
        while engine.waiting and engine.running is None:
            self._kernel_starts(engine.waiting.popleft(), engine)

    def _slow(self, place: int, rate: float) -> None:
        """Change the rate of a class's running kernels."""
        for engine in self._engines[place]:
            kernel = engine.running
            if kernel is not None and kernel.rate != rate:
                kernel.left -= (self._now - kernel.since) * kernel.rate
                kernel.since, kernel.rate = self._now, rate
                self._foresee(self._now + max(0.0, kernel.left) / rate, kernel)

    # Transfers

    def _comes(self, number: int) -> None:
        """Handle a class's arrival at a collective."""
        call = self._ops[number].collective
        assert call is not None
        meeting = self._meeting.get(number)
        members = [number]
        if meeting is not None:
            members = self._arrived.setdefault(meeting, [])
            members.append(number)
            if len(members) < len(meeting[1]):
                return
            del self._arrived[meeting]
            # The price is that of the rank that gives most, independent of the order of arrival; of a pair the send's.
            members.sort()
            calls = [of for member in members if (of := self._ops[member].collective)]
            call = max(calls, key=lambda one: (one.bytes, one.kind))
        self._transfer_starts(members, self._costs.legs(call) if self._only != "compute" else ())

    def _transfer_starts(self, members: list[int], legs: tuple[Leg, ...]) -> None:
        for number in members:
            self._start[number] = self._now
        if not legs:
            for number in members:
                self._finish(number)
            return
        if self._kind[members[0]] == _CALL:
            for number in members:
                self._sends(self._class[number], 1)
        self._next_leg(_Transfer(members, legs))

    def _sends(self, place: int, more: int) -> None:
        before = self._sending[place]
        self._sending[place] += more
        if not before or not self._sending[place]:
            self._slow(place, 1.0 if before else self._slowed)

    def _next_leg(self, transfer: _Transfer) -> None:
        transfer.at += 1
        if transfer.at == len(transfer.legs):
            if self._kind[transfer.ops[0]] == _CALL:
                for number in transfer.ops:
                    self._sends(self._class[number], -1)
            for number in transfer.ops:
                self._finish(number)
            return
        leg = transfer.legs[transfer.at]
        # The rate is 0 until the latency is over: only then is anything used.
        transfer.left, transfer.rate, transfer.since = leg.seconds, 0.0, self._now + leg.latency
        self._foresee(self._now + leg.latency, transfer)

    def _transfer_goes_on(self, transfer: _Transfer) -> None:
        """Handle the end of a leg or of its latency."""
        leg = transfer.legs[transfer.at]
        if transfer.rate:
            rates = self._sharing.remove(transfer)
            self._set(rates)
            self._next_leg(transfer)
        elif leg.seconds:
            uses: dict[Resource, float] = {
                (self._class[number], resource, way): share
                for number in transfer.ops
                for resource, share in leg.uses
                for way in (self._ways(number) if resource.startswith("link:") else ("",))
            }
            self._set(self._sharing.add(transfer, uses))
        else:
            self._next_leg(transfer)

    def _ways(self, number: int) -> tuple[str, ...]:
        """The directions of its device's links that a transfer uses."""
        call = self._ops[number].collective
        if call is None or not self._directed:
            return ("",)
        return (call.kind,) if call.paired else ("send", "recv")

    def _set(self, rates: dict[_Transfer, float]) -> None:
        now = self._now
        for transfer, rate in rates.items():
            if transfer.rate != rate:
                transfer.left -= (now - transfer.since) * transfer.rate
                transfer.since, transfer.rate = now, rate
                self._foresee(now + max(0.0, transfer.left) / rate, transfer)

    def _circle(self) -> str:
        """Describes who waits for whom, for calls that some classes have reached and others have not."""
        lines = []
        names = list(self._trace.ops)
        for (tag, classes, turn), members in self._arrived.items():
            here = ", ".join(
                f"{names[self._class[number]]!r} (op {self._ops[number].index}, {self._ops[number].name})"
                for number in members
            )
            come = {names[self._class[number]] for number in members}
            absent = ", ".join(repr(name) for name in classes if name not in come)
            lines.append(
                f"{here} wait{'s' if len(members) == 1 else ''} for {absent} in call {turn + 1} tagged {tag!r}"
            )
        return (
            f"the trace cannot go on after {self._now:.6g} s, its classes wait for one another: "
            + "; ".join(lines[:4])
            + ("; …" if len(lines) > 4 else "")
            + ". Put the calls of a queue in the same order in all classes, or on queues of their own"
        )


class _Queues:
    """Kinds and engines of ops, each name of a queue looked at once."""

    def __init__(self) -> None:
        self._computes: dict[str, bool] = {}
        self._copies: dict[str, bool] = {}

    def of(self, op: Op) -> tuple[int, str]:
        """The kind of an op, and the engine or queue that it runs on (`Op.engine`)."""
        queue = op.queue
        computes = self._computes.get(queue)
        if computes is None:
            computes = self._computes[queue] = is_compute(queue)
            self._copies[queue] = copy_tiers(queue) is not None
        if computes:
            matrix = op.work is not None and op.work.kind in ("matmul", "attention")
            return _KERNEL if op.collective is None else _CALL, "matrix" if matrix else "vector"
        if op.collective is not None:
            return _CALL, queue
        return _COPY if op.work is not None and self._copies[queue] else _HOST, queue
