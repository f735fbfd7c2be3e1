"""Closed forms of collectives: n ranks on links of latency α and bandwidth β, each giving B bytes.

The simulator, the calibration and the planner price collectives with these forms. n, B, α and β are numbers, or arrays
with an entry for each configuration (`Number`). The planner takes α = 0 here and adds the latency of trees, to which
libraries turn for small messages (`planner.cost_model.collectives`).

| Collective | Seconds | Function |
|---|---|---|
| all-reduce, a ring | 2 (n − 1) (α + B / (n β)) | `all_reduce` |
| all-gather, a ring | (n − 1) (α + B / β) | `all_gather` |
| reduce-scatter, a ring | (n − 1) (α + B / (n β)) | `reduce_scatter` |
| all-to-all, pair by pair | (n − 1) (α + B / (n β)) | `reduce_scatter` |
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

Others, and ranks that lie on the levels in unequal parts, run flat: as if every link were the slowest of those spanned.
An all-to-all may also go directly from each rank to each other; of what a rank gives, the ranks of one level then get
(g − 1) · inner / n, `inner` being the ranks inside the level (`direct_shares`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from hyper_parallel.errors import ConfigError, nearest

Number = Any
"""A float, or an array of floats: whatever has arithmetic. The forms only add, multiply and divide."""


@dataclass(frozen=True)
class Leg:
    """A part of a collective that runs on one link level."""

    kind: str
    level: str
    ranks: Number
    bytes: Number
    """Bytes that each rank gives."""


def all_reduce(n: Number, size: Number, latency: Number, bandwidth: Number) -> Number:
    """2 (n − 1) (α + B / (n β))"""
    return 2 * (n - 1) * (latency + size / (n * bandwidth))


def all_gather(n: Number, size: Number, latency: Number, bandwidth: Number) -> Number:
    """(n − 1) (α + B / β)"""
    return (n - 1) * (latency + size / bandwidth)


def reduce_scatter(n: Number, size: Number, latency: Number, bandwidth: Number) -> Number:
    """(n − 1) (α + B / (n β)): of an all-to-all too"""
    return (n - 1) * (latency + size / (n * bandwidth))


def broadcast(n: float, size: float, latency: float, bandwidth: float) -> float:
    """(n − 1) α + B / β"""
    return (n - 1) * latency + size / bandwidth if n > 1 else 0.0


def send(n: Number, size: Number, latency: Number, bandwidth: Number) -> Number:
    """α + B / β"""
    return latency + size / bandwidth


FORMS: dict[str, Callable[[float, float, float, float], float]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": reduce_scatter,
    "broadcast": broadcast,
    "reduce": broadcast,
    "gather": all_gather,
    "scatter": reduce_scatter,
    "send": send,
    "recv": send,
    "barrier": all_reduce,
}
"""(n, B, α, β) to seconds, by kind."""


def form(kind: str) -> Callable[[float, float, float, float], float]:
    """The closed form of a kind. Raises ConfigError for an unknown kind."""
    if kind not in FORMS:
        hint = nearest(kind, FORMS) or f"; known are {', '.join(FORMS)}"
        raise ConfigError(f"there is no collective {kind!r}{hint}")
    return FORMS[kind]


def bytes_received(kind: str, n: int, size: int) -> int:
    """Bytes that a rank receives in a collective of n ranks that each give `size` bytes.

    The closed form with no latency and a bandwidth of 1 B/s. Raises ConfigError for an unknown kind.
    """
    return int(form(kind)(n, Fraction(size), 0, 1))  # type: ignore[arg-type]


def legs(kind: str, size: Number, radices: Sequence[tuple[str, Number]]) -> list[Leg]:
    """A collective of `size` bytes a rank, level by level; `radices` as `Cluster.radices` gives them."""
    inside_out = list(reversed(radices))
    if len(inside_out) < 2:
        return [Leg(kind, level, n, size) for level, n in inside_out]
    if kind == "all_reduce":
        *inner, (top, ranks) = inside_out
        down, up, part = [], [], size
        for level, n in inner:
            down.append(Leg("reduce_scatter", level, n, part))
            part = part / n
            up.append(Leg("all_gather", level, n, part))
        return [*down, Leg("all_reduce", top, ranks, part), *reversed(up)]
    if kind == "all_to_all":
        return [Leg(kind, level, n, size) for level, n in inside_out]
    assert kind in BY_LEVELS, f"{kind} does not run level by level"
    found, part = [], size
    for level, n in radices if kind == "all_gather" else inside_out:
        found.append(Leg(kind, level, n, part))
        part = part * n if kind == "all_gather" else part / n
    return found


def direct_shares(radices: Sequence[tuple[str, Number]]) -> dict[str, Number]:
    """By level, the share of what a rank gives that goes to ranks of that level, where each sends to each directly."""
    inner: dict[str, Number] = {}
    ranks: Number = 1.0
    for level, n in reversed(radices):
        inner[level] = (n - 1) * ranks
        ranks = ranks * n
    return {level: others / ranks for level, others in inner.items()}


BY_LEVELS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Kinds that can run level by level."""
