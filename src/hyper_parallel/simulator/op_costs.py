"""Isolated cost of each op of a Trace on a Cluster; equal ops are priced once.

A transfer is a sequence of legs. Each has a latency, which uses no resource, and seconds in which it uses resources:

    seconds of a leg = leg(B) − leg(0)         latency = leg(0)                    `Costs.legs`
    share of a tier  = (B / seconds) / tier's bandwidth in that direction          `Costs.copy`
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hyper_parallel.cluster import Cluster
from hyper_parallel.cluster.cluster import Algorithm
from hyper_parallel.cluster.collective_cost import TokenDispatch
from hyper_parallel.cluster.device import Device
from hyper_parallel.errors import ConfigError, TraceError
from hyper_parallel.trace import Collective, Op, Trace, copy_tiers
from hyper_parallel.workload.work import Work

_IN_PARTS = ("all_gather", "reduce_scatter")
"""Collectives that libraries run in parts beside the product before or behind them."""


@dataclass(frozen=True, slots=True)
class Leg:
    """One leg of a transfer."""

    latency: float
    """Latency in seconds, independent of sharing."""
    seconds: float
    """Further seconds, if alone on its resources."""
    uses: tuple[tuple[str, float], ...]
    """Resources used on each of its ranks' devices: (resource, share)."""


class Costs:
    """Costs of ops on one cluster."""

    def __init__(self, cluster: Cluster, algorithm: Algorithm = None, ranks: int = 1) -> None:
        """`ranks`: number of ranks, which copy at the same time."""
        if cluster.device is None:
            raise ConfigError(
                f"the cluster {cluster.name or cluster.source!r} describes no device; name a preset such as h100, or "
                "a file that `hyper-parallel calibrate` wrote"
            )
        self.device: Device = cluster.device
        self._cluster = cluster
        self._algorithm, self._ranks = algorithm, ranks
        self._works: dict[Work, float] = {}
        self._calls: dict[tuple[str, int, int, bool, float], tuple[Leg, ...]] = {}
        self._groups: dict[int, tuple[int, ...]] = {}
        self._copies: dict[tuple[str, float], tuple[Leg, ...]] = {}

    def seconds(self, op: Op) -> float:
        """Seconds of a kernel or of host work; 0 for an op without work."""
        if op.work is None:
            return 0.0
        found = self._works.get(op.work)
        if found is None:
            on_host = op.queue == "host" and op.work.kind == "optimizer"
            found = self._works[op.work] = (
                self._cluster.host_seconds(op.work, self._ranks) if on_host else self.device.seconds(op.work)
            )
        return found

    def legs(self, call: Collective) -> tuple[Leg, ...]:
        """Legs of a collective, level by level; none for a group of one."""
        # A group's tuple of ranks may be long: it is known by its identity, and kept so that this stays true.
        self._groups[id(call.ranks)] = call.ranks
        dispatched = self.is_dispatched(call)
        exposed = 1.0 - (self.device.comm_hidden.get(call.axis, 0.0) if call.kind in _IN_PARTS else 0.0)
        key = (call.kind, call.bytes, id(call.ranks), dispatched, exposed)
        found = self._calls.get(key)
        if found is None and dispatched and (found := self._dispatch(call)) is not None:
            self._calls[key] = found
        if found is None:
            cluster, legs = self._cluster, []
            for leg in cluster.legs(call.kind, call.bytes, call.ranks, self._algorithm):
                latency = cluster.leg_seconds(replace(leg, bytes=0))
                seconds = exposed * max(0.0, cluster.leg_seconds(leg) - latency)
                legs.append(
                    Leg(
                        latency, seconds, ((f"link:{leg.level}", 1.0), *self._host_uses(leg.level, call.kind))
                    )
                )
            found = self._calls[key] = tuple(legs)
        return found

    def _host_uses(self, level: str, kind: str) -> tuple[tuple[str, float], ...]:
        """What a collective takes of its devices' links to the host, where it passes through the host's memory."""
        if not self._cluster.passes_host(level):
            return ()
        share = self._cluster.link(level).reached / self._cluster.link("host").reached
        ways = {"send": ("to",), "recv": ("from",)}.get(kind, ("to", "from"))
        return tuple((f"{way}:host", share) for way in ways)

    def is_dispatched(self, call: Collective) -> bool:
        """Whether a collective is an exchange of tokens with experts that a library for it makes."""
        tokens = call.kind == "all_to_all" and call.axis == "expert"
        return tokens and isinstance(self._algorithm, TokenDispatch)

    def collective_seconds(self, call: Collective) -> float:
        """Seconds of a collective, alone on its links."""
        if not self.is_dispatched(call):
            return self._cluster.collective_seconds(call.kind, call.bytes, call.ranks, self._algorithm)
        return sum(leg.latency + leg.seconds for leg in self.legs(call))

    def _dispatch(self, call: Collective) -> tuple[Leg, ...] | None:
        """One leg on all levels at once, as long as on the slowest; None where the levels hold unequal parts."""
        cluster, how = self._cluster, self._algorithm
        radices = cluster.radices(call.ranks)
        assert isinstance(how, TokenDispatch)
        if radices is None:
            return None
        busy = {
            level: size / cluster.link(level).reached
            for level, size in how.bytes(call.bytes, radices).items()
        }
        plain = [
            (leg.level, cluster.leg_seconds(leg)) for leg in cluster.legs(call.kind, call.bytes, call.ranks)
        ]
        latency = sum(cluster.link(level).setup + cluster.link(level).latency for level in busy)
        once, every = max(busy.values(), default=0.0), sum(seconds for _, seconds in plain)
        seconds = how.share * once + (1 - how.share) * max(0.0, every - latency)
        if not seconds:
            return ()
        uses = {level: how.share * one for level, one in busy.items()}
        for level, one in plain:
            uses[level] = uses.get(level, 0.0) + (1 - how.share) * one
        shares = ((f"link:{level}", min(1.0, one / seconds)) for level, one in uses.items())
        return (Leg(latency, seconds, tuple(shares)),)

    def copy(self, op: Op) -> tuple[Leg, ...]:
        """The leg of a copy between tiers."""
        assert op.work is not None
        key = (op.queue, op.work.read)
        if key not in self._copies:
            self._copies[key] = self._copy(op.queue, op.work.read)
        return self._copies[key]

    def _copy(self, queue: str, count: float) -> tuple[Leg, ...]:
        tiers = copy_tiers(queue)
        assert tiers is not None
        source, target = tiers
        cluster = self._cluster
        latency = cluster.copy_seconds(source, target, 0, self._ranks)
        seconds = cluster.copy_seconds(source, target, count, self._ranks) - latency
        if seconds <= 0:
            return (Leg(latency, 0.0, ()),)
        speed = count / seconds
        uses = [
            (f"read:{source}", min(1.0, speed / cluster.tier(source).read)),
            (f"write:{target}", min(1.0, speed / cluster.tier(target).write)),
        ]
        for tier, way in ((source, "from"), (target, "to")):
            if tier in cluster.links:
                uses.append((f"{way}:{tier}", min(1.0, speed / cluster.links[tier].reached)))
        return (Leg(latency, seconds, tuple(uses)),)


def main_dtype(ops: Iterable[Op]) -> str | None:
    """The dtype with the most FLOPs of matrix products; None without matrix products."""
    flops: dict[str, float] = defaultdict(float)
    for op in ops:
        if op.work and op.work.flops:
            flops[op.work.dtype] += op.work.flops
    return max(flops, key=lambda dtype: flops[dtype], default=None)


def check_fits(trace: Trace, cluster: Cluster) -> None:
    """Raise TraceError if the trace has more ranks than the cluster."""
    if cluster.ranks is not None and max(trace.classes, default=-1) >= cluster.ranks:
        raise TraceError(
            f"the trace has ranks up to {max(trace.classes)} and the cluster {cluster.name!r} has "
            f"{cluster.ranks} devices; name a cluster with as many as the strategy multiplies to"
        )
