"""Closed form of a pass with its read-volume bound.

The bound is what no implementation can beat on the device and link:

    bound = max( bytes that must be read / memory bandwidth,        weights that are used and contexts that are seen
                 FLOPs / peak,                                      matrix products and attention
                 bytes in tiers / link bandwidth,                   streamed weights, contexts and experts
                 collectives )                                                                       `PassCost.bound`

The prediction prices every operator on the device (`Device.seconds`) and follows the passes layer by layer: a layer
begins when the one before it has ended and what it reads of a tier has arrived; copies follow one another on the link,
each as soon as a buffer of the two is free (`_Follower`). It is the pass behind an equal one, so that its first
copies ran beside that. `pass_trace` gives the same as a Trace for the discrete-event engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hyper_parallel.cluster import Cluster
from hyper_parallel.cluster.collective_cost import distinct_experts
from hyper_parallel.simulator.generation.pass_model import Layer, PassLoad, PassModel, PassOp, works
from hyper_parallel.simulator.generation.tier_split import BUFFERS, TierSplit
from hyper_parallel.simulator.op_costs import Costs
from hyper_parallel.trace import Op
from hyper_parallel.workload.work import Work


@dataclass(frozen=True)
class Sparse:
    """The settings that decide how much of experts and contexts a pass reads, beside its load."""

    skew: float = 0.0
    """As `GenerationWorkload.expert_skew`."""
    selected: int = 0
    """As `GenerationWorkload.selected_tokens`."""
    again: float = 0.0
    """As `GenerationWorkload.selected_again`."""
    apart: bool = True
    """Whether what is not selected lies in a tier; else the device has all of it."""


@dataclass(frozen=True)
class PassCost:
    """Seconds of one pass on one rank."""

    seconds: float
    """Predicted."""
    read: float
    """Bytes of device memory that must be read: weights that are used, contexts that are seen."""
    reading: float
    """Seconds to read them."""
    computing: float
    """Seconds of the FLOPs at the peak."""
    linking: float
    """Seconds to copy what lies in tiers at the link's rate."""
    collectives: float
    """Seconds of the collectives."""
    copied: float
    """Bytes over the link to the device."""
    host: float = 0.0
    """Seconds of experts on the host, at its memory's rate."""

    @property
    def bound(self) -> float:
        """Seconds that no implementation beats."""
        return max(self.reading, self.computing, self.linking, self.collectives, self.host)

    @property
    def limit(self) -> str:
        """The resource that decides the bound."""
        parts = {
            "bytes that must be read": self.reading,
            "FLOPs": self.computing,
            "the link": self.linking,
            "collectives": self.collectives,
            "the host's memory": self.host,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class LayerCost:
    """Seconds of a layer's parts, and the bytes that it needs of tiers."""

    before: float
    """Up to attention, or to the experts where it has none."""
    attending: float
    between: float
    """From attention to the experts."""
    behind: float
    """The experts and what follows; of a layer without experts 0."""
    weights: float
    """Bytes of streamed weights."""
    contexts: float
    """Bytes of contexts that attention waits for."""
    experts: float
    """Bytes of chosen experts that are fetched."""
    host: float
    """Seconds of experts on the host."""


class PassPricer:
    """Prices passes of one model on one cluster under one tier split."""

    def __init__(
        self, model: PassModel, cluster: Cluster, split: TierSplit | None = None, sparse: Sparse | None = None
    ) -> None:
        self.model, self.cluster = model, cluster
        self.split, self.sparse = split or TierSplit(), sparse or Sparse()
        self._costs = Costs(cluster, None, model.world)
        self._streamed = self.split.streamed(model)
        device = self._costs.device
        self.memory = device.memory.read
        self.link = (
            link_rate(cluster, self.split.tier, model.world) if self.split.any or self.selects else 0.0
        )

    @property
    def selects(self) -> bool:
        """Whether sparse attention selects tokens of contexts in a tier."""
        return self.sparse.selected > 0 and self.sparse.apart

    def touched(self, load: PassLoad) -> float:
        """Share of the rank's experts that the tokens of a pass choose."""
        model = self.model
        if not model.experts:
            return 1.0
        tokens = load.tokens * model.routed
        return distinct_experts(model.experts, model.chosen, tokens, self.sparse.skew) / model.experts

    def touched_here(self, load: PassLoad) -> float:
        """Share of the rank's experts that are chosen and computed on the device."""
        split, local = self.split, self.model.local_experts
        if not (split.experts and local and split.experts_computed == "host"):
            return self.touched(load)
        return self.touched(load) - self.fetched(load) * min(split.experts, local) / local

    def fetched(self, load: PassLoad) -> float:
        """Share of the experts that are away which the tokens of a pass choose."""
        model, local = self.model, self.model.local_experts
        if not (self.split.experts and local):
            return 0.0
        away = round(model.experts * min(self.split.experts, local) / local)
        tokens = load.tokens * model.routed
        first = model.experts - away
        return distinct_experts(model.experts, model.chosen, tokens, self.sparse.skew, first) / away

    def seconds_of(self, op: PassOp, load: PassLoad, touched: float) -> float:
        """Seconds of an operator that is not attention."""
        if op.collective is not None:
            return self._costs.collective_seconds(op.call(load.rows, load.answers))
        return self.work_seconds(op.work(load.rows, load.answers, touched))

    def work_seconds(self, work: Work) -> float:
        """Seconds of a kernel."""
        return self._costs.seconds(Op(0, work.op, work=work))

    def context_bytes(self, layer: Layer, load: PassLoad) -> float:
        """Bytes of contexts in a tier that a layer's attention reads in a pass."""
        sizes = layer.attention
        if sizes is None:
            return 0.0
        if self.selects:
            # Of the selected tokens, those that were not selected before. A piece of a prompt reads all before it.
            return sum(
                (
                    min(self.sparse.selected, piece.first) * (1 - self.sparse.again)
                    if piece.count == 1
                    else min(piece.first, piece.read(sizes.window))
                )
                * sizes.token
                for piece in load.pieces
            )
        return sum(
            min(piece.first, piece.read(sizes.window)) * self.split.contexts * sizes.token
            for piece in load.pieces
        )

    def layer(self, at: int, load: PassLoad) -> LayerCost:
        """The layer at a place."""
        kind = self.model.order[at]
        layer = self.model.kinds[kind]
        touched = self.touched_here(load)
        parts = [0.0, 0.0, 0.0, 0.0]
        place = 0
        for op in layer.ops:
            if op.role == "attention":
                assert layer.attention is not None
                for work in works(load, layer.attention, self.sparse.selected):
                    parts[1] += self.work_seconds(work)
                place = 2
                continue
            if op.role == "experts":
                place = 3
            parts[place] += self.seconds_of(op, load, touched)
        away = self.split.away(self.model, layer) * self.fetched(load)
        streamed = self._streamed[at]
        on_host = self.split.experts_computed == "host"
        return LayerCost(
            before=parts[0],
            attending=parts[1],
            between=parts[2],
            behind=parts[3],
            weights=float(layer.weights) if streamed else 0.0,
            contexts=self.context_bytes(layer, load),
            experts=0.0 if streamed or on_host else away,
            host=self.host_seconds(away) if on_host and not streamed else 0.0,
        )

    def host_seconds(self, size: float) -> float:
        """Seconds in which the host reads these bytes of experts to compute with them."""
        return self.cluster.host_seconds(Work("optimizer", read=size), self.model.world) if size else 0.0

    def price(self, load: PassLoad) -> PassCost:
        """The cost of a pass."""
        model, touched = self.model, self.touched_here(load)
        kinds: dict[tuple[int, bool], LayerCost] = {}
        costs = []
        for at, kind in enumerate(model.order):
            key = (kind, self._streamed[at])
            if key not in kinds:
                kinds[key] = self.layer(at, load)
            costs.append(kinds[key])
        first = sum(self.seconds_of(op, load, touched) for op in model.before)
        last = sum(self.seconds_of(op, load, touched) for op in model.after)
        follower = _Follower(self, first, costs, last)
        copied = sum(one.weights + one.contexts + one.experts for one in costs)
        read, flops = self.volume(load)
        by_kind = [self._collectives(layer.ops, load) for layer in model.kinds]
        collectives = sum(by_kind[kind] for kind in model.order)
        collectives += self._collectives((*model.before, *model.after), load)
        return PassCost(
            seconds=follower.steady(),
            read=read,
            reading=read / self.memory,
            computing=flops,
            linking=copied / self.link if copied else 0.0,
            collectives=collectives,
            copied=copied,
            host=sum(one.host for one in costs),
        )

    def _collectives(self, ops: Iterable[PassOp], load: PassLoad) -> float:
        return sum(self.seconds_of(op, load, 1.0) for op in ops if op.collective is not None)

    def volume(self, load: PassLoad) -> tuple[float, float]:
        """Bytes of weights and contexts that a pass must read from the device's memory, and seconds of its FLOPs at the
        peak. What is computed on the host is not read there."""
        touched, device = self.touched_here(load), self._costs.device
        rows, answers = load.rows, load.answers
        by_kind = []
        for layer in self.model.kinds:
            read = seconds = 0.0
            for op in layer.ops:
                if op.kind == "matmul":
                    work = op.work(rows, answers, touched)
                    read += op.read.fixed * (touched if op.role == "experts" else 1.0)
                    seconds += work.flops / device.peak(work.dtype)
            if layer.attention is not None:
                for work in works(load, layer.attention, self.sparse.selected):
                    seconds += work.flops / device.peak(work.dtype)
                window = min(filter(None, (layer.attention.window, self.sparse.selected)), default=0)
                read += sum(piece.read(window) for piece in load.pieces) * layer.attention.token
            by_kind.append((read, seconds))
        outer = [op for op in (*self.model.before, *self.model.after) if op.kind == "matmul"]
        read = sum(op.read.fixed for op in outer)
        seconds = sum((work := op.work(rows, answers)).flops / device.peak(work.dtype) for op in outer)
        for kind in self.model.order:
            read += by_kind[kind][0]
            seconds += by_kind[kind][1]
        return read, seconds

    def copy_seconds(self, size: float) -> float:
        """Seconds of one copy from the tier to the device."""
        return self.cluster.copy_seconds(self.split.tier, "device", size, self.model.world) if size else 0.0


class _Follower:
    """Follows two equal passes, layer by layer."""

    def __init__(self, pricer: PassPricer, first: float, layers: list[LayerCost], last: float) -> None:
        self._pricer, self._first, self._layers, self._last = pricer, first, layers, last
        self._linked = 0.0
        """When the link is free."""
        self._used: list[float] = []
        """When each streamed layer was done with."""
        self._attended: list[float] = []
        """When the attention of each layer with contexts in a tier had ended."""

    def steady(self) -> float:
        """Seconds of a pass behind an equal one."""
        if not any(one.weights or one.contexts or one.experts or one.host for one in self._layers):
            parts = (one.before + one.attending + one.between + one.behind for one in self._layers)
            return self._first + sum(parts) + self._last
        warm = self._passed(0.0)
        return self._passed(warm) - warm

    def _copied(self, size: float, since: float) -> float:
        """When a copy has arrived that may begin at `since`."""
        self._linked = max(self._linked, since) + self._pricer.copy_seconds(size)
        return self._linked

    def _passed(self, now: float) -> float:
        begun = now
        now += self._first
        before = begun
        for one in self._layers:
            if one.weights:
                free = self._used[-BUFFERS] if len(self._used) >= BUFFERS else 0.0
                now = max(now, self._copied(one.weights, free))
            if one.contexts:
                free = self._attended[-BUFFERS] if len(self._attended) >= BUFFERS else 0.0
                # What is selected is known one layer ahead; what is read whole, before the pass.
                since = max(free, before if self._pricer.selects else begun)
                arrived = self._copied(one.contexts, since)
                before = now
                now = max(now + one.before, arrived)
            else:
                before = now
                now += one.before
            now += one.attending
            if one.contexts:
                self._attended.append(now)
            now += one.between
            if one.experts:
                now = self._copied(one.experts, now)
            now = max(now + one.behind, now + one.host)
            if one.weights:
                self._used.append(now)
        return now + self._last


def link_rate(cluster: Cluster, tier: str, ranks: int) -> float:
    """B/s at which one of `ranks` devices reads a tier, all at once."""
    large = 2.0**33
    latency = cluster.copy_seconds(tier, "device", 0, ranks)
    return large / (cluster.copy_seconds(tier, "device", large, ranks) - latency)
