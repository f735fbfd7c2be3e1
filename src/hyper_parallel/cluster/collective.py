"""Closed forms of collectives: n ranks on links of latency α and bandwidth β, each giving B bytes.

| Collective | Seconds | Function |
|---|---|---|
| all-reduce, a ring | 2 (n − 1) (α + B / (n β)) | `all_reduce` |
| all-gather, a ring | (n − 1) (α + B / β) | `all_gather` |
| reduce-scatter, a ring | (n − 1) (α + B / (n β)) | `reduce_scatter` |
| all-to-all, pair by pair | (n − 1) (α + B / (n β)) | `all_to_all` |
| broadcast, reduce: a chain, in pieces | (n − 1) α + B / β | `broadcast` |
| gather: the root receives | (n − 1) (α + B / β) | `all_gather` |
| scatter: the root sends what it has | (n − 1) (α + B / (n β)) | `reduce_scatter` |
| send, recv | α + B / β | `send` |
| barrier: an all-reduce of nothing | 2 (n − 1) α | `all_reduce` |

A link's `setup` is added once for each call. Rings: Patarasu and Yuan, *Bandwidth optimal all-reduce algorithms*,
JPDC 69(2), 2009; the others: Thakur, Rabenseifner and Gropp, *Optimization of collective communication operations in
MPICH*, IJHPCA 19(1), 2005. B is what a rank *gives*: its shard in an all-gather, the whole in the others.

Over several link levels a collective runs level by level, as `cluster.traffic` counts it and `placement.collectives:
levels` runs it (`legs`), g ranks inside and k across:

    all-reduce       reduce-scatter of B inside, all-reduce of B/g across, all-gather of B/g inside
    reduce-scatter   of B inside, then of B/g across
    all-gather       of B across, then of B·k inside
    all-to-all       of B inside, then of B across

Other collectives, and ranks that lie on the levels in unequal parts, run flat: as if every link were the slowest one
that they span.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hyper_parallel.errors import ConfigError, nearest


@dataclass(frozen=True)
class Leg:
    """A part of a collective that runs on one link level."""

    kind: str
    level: str
    ranks: int
    bytes: float
    """Bytes that each rank gives."""


def all_reduce(n: int, size: float, latency: float, bandwidth: float) -> float:
    """2 (n − 1) (α + B / (n β))"""
    return 2 * (n - 1) * (latency + size / (n * bandwidth))


def all_gather(n: int, size: float, latency: float, bandwidth: float) -> float:
    """(n − 1) (α + B / β)"""
    return (n - 1) * (latency + size / bandwidth)


def reduce_scatter(n: int, size: float, latency: float, bandwidth: float) -> float:
    """(n − 1) (α + B / (n β))"""
    return (n - 1) * (latency + size / (n * bandwidth))


def all_to_all(n: int, size: float, latency: float, bandwidth: float) -> float:
    """(n − 1) (α + B / (n β))"""
    return (n - 1) * (latency + size / (n * bandwidth))


def broadcast(n: int, size: float, latency: float, bandwidth: float) -> float:
    """(n − 1) α + B / β"""
    return (n - 1) * latency + size / bandwidth if n > 1 else 0.0


def send(n: int, size: float, latency: float, bandwidth: float) -> float:
    """α + B / β"""
    return latency + size / bandwidth


FORMS: dict[str, Callable[[int, float, float, float], float]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "broadcast": broadcast,
    "reduce": broadcast,
    "gather": all_gather,
    "scatter": reduce_scatter,
    "send": send,
    "recv": send,
    "barrier": all_reduce,
}
"""(n, B, α, β) to seconds, by kind."""


def form(kind: str) -> Callable[[int, float, float, float], float]:
    """The closed form of a kind. Raises ConfigError for an unknown kind."""
    if kind not in FORMS:
        hint = nearest(kind, FORMS) or f"; known are {', '.join(FORMS)}"
        raise ConfigError(f"there is no collective {kind!r}{hint}")
    return FORMS[kind]


def legs(kind: str, size: float, radices: Sequence[tuple[str, int]]) -> list[Leg]:
    """A collective of `size` bytes a rank, level by level; `radices` as `Cluster.radices` gives them."""
    inside_out = list(reversed(radices))
    if len(inside_out) < 2:
        return [Leg(kind, level, n, size) for level, n in inside_out]
    if kind == "all_reduce":
        *inner, (top, ranks) = inside_out
        down, up, part = [], [], size
        for level, n in inner:
            down.append(Leg("reduce_scatter", level, n, part))
            part /= n
            up.append(Leg("all_gather", level, n, part))
        return [*down, Leg("all_reduce", top, ranks, part), *reversed(up)]
    found, part = [], size
    if kind == "all_gather":
        for level, n in radices:
            found.append(Leg(kind, level, n, part))
            part *= n
    elif kind == "reduce_scatter":
        for level, n in inside_out:
            found.append(Leg(kind, level, n, part))
            part /= n
    else:
        assert kind == "all_to_all", f"{kind} does not run level by level"
        found = [Leg(kind, level, n, size) for level, n in inside_out]
    return found


BY_LEVELS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Kinds that can run level by level."""
