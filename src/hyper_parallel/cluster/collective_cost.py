"""Closed forms of collectives: n ranks on links of latency α and bandwidth β, each giving B bytes.

The simulator, the calibration and the planner price collectives with these forms. n, B, α and β are numbers, or arrays
with an entry for each configuration (`Number`). The planner takes α = 0 here and adds the latency of trees, to which
libraries turn for small messages (`planner.cost_model.operators`).

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

Over several link levels a collective runs level by level, as `cluster.cluster` counts it and `placement.collectives:
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

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
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


# Token dispatch: bytes that tokens take to their experts on each link level, with one copy of a token to each domain.
#
# A token chooses c of the experts of R = d · k ranks: d in each domain of fast links (a node, or a supernode), k
# domains on the network. An all-to-all sends a row for each expert. DeepEP and HybridEP send one row to each domain,
# which is forwarded there to the ranks that need it (DeepSeek-V3, arXiv 2412.19437, section 3.2.2):
#
#     destinations(p) = p (1 − (1 − 1/p)^c)         of p places, those that get a token            `destinations`
#     network         = destinations(r) (1 − 1/k)   copies of a token, over the network
#     inside          = destinations(r d) (1 − 1/d) copies of a token, over the links of a domain
#
# r of the k domains can hold a token's experts, where it chooses groups of experts first (`reached`). The planner's
# closed forms (`planner.cost_model.layer_collectives`) and the simulator take both functions from here.

_MOST_GROUPS = 64


@dataclass(frozen=True)
class TokenDispatch:
    """A library that sends one copy of a token to each domain of its experts; `train` sends a row for each expert."""

    chosen: float
    """Experts that a token goes to."""
    groups: float = 0.0
    """Groups of experts from which a token chooses first; 0 without groups."""
    chosen_groups: float = 0.0
    share: float = 1.0
    """Share of the exchanges that go this way, the others being all-to-alls: between 0 and 1 where it is not known."""

    def bytes(self, size: float, radices: Sequence[tuple[str, int]]) -> dict[str, float]:
        """Bytes that a rank sends on each level, of `size` bytes with a row for each expert.

        `radices` as `Cluster.radices` gives them. Levels that no link of is needed are left out.

        >>> TokenDispatch(2).bytes(2.0, [("network", 2), ("node", 2)])
        {'network': 0.75, 'node': 0.875}
        """
        domains = math.prod(n for level, n in radices if level == "network")
        within = [(level, n) for level, n in radices if level != "network"]
        inside = math.prod(n for _, n in within)
        held = reached(self.groups, self.chosen_groups, domains)
        token = size / max(self.chosen, 1.0)
        found = {}
        if domains > 1:
            found["network"] = token * destinations(held, self.chosen) * (1 - 1 / domains)
        copies = token * destinations(held * inside, self.chosen) * (1 - 1 / inside)
        ranks = 1
        for level, n in reversed(within):
            # Of what goes to other ranks of a domain, the part whose way ends on this level.
            found[level] = copies * (n - 1) * ranks / (inside - 1)
            ranks *= n
        return found


def destinations(places: Number, chosen: Number) -> Number:
    """The number of `places` that hold at least one of `chosen`, where they hold a token's possible experts equally."""
    return places * (1 - (1 - 1 / places) ** chosen)


def reached(groups: Number, chosen: Number, domains: Number) -> Number:
    """Domains among which a token's experts lie, of `domains`, where it chooses some groups of experts first.

    With G groups, of which a token chooses g, and k domains: k (1 − Π_{i<g} (1 − (G / k) / (G − i))) where a domain has
    several groups, k g / G where a group has several. Selections are products with truth values, so that arrays of
    equal shapes are computed as numbers are.
    """
    limited = (groups > 0) * (chosen > 0) * 1.0
    groups = groups + (1 - limited)
    held = groups / domains
    missed: Number = 1.0
    for i in range(int(min(getattr(chosen, "max", lambda: chosen)(), _MOST_GROUPS))):
        behind = groups - i
        left = 1 - held / (behind + (1 - behind) * (behind < 1))
        missed = missed * (left * (left > 0)) ** (i < chosen)
    found = (held >= 1) * domains * (1 - missed) + (held < 1) * domains * chosen / groups
    found = found + (1 - found) * (found < 1)
    found = found + (domains - found) * (found > domains)
    return limited * found + (1 - limited) * domains


# Experts of a layer that the tokens of a pass choose: which weights a pass reads.
#
#     touched = Σ_experts 1 − (1 − k p_i)^T          experts that at least one of T tokens chooses   `distinct_experts`
#
# p_i is an expert's share of all choices: 1/E where routing is balanced, else i^−s normalized (Zipf), so that a skew s
# of 0 is balanced; k p_i is at most 1.


@lru_cache(maxsize=1024)
def distinct_experts(experts: int, chosen: int, tokens: float, skew: float = 0.0, first: int = 0) -> float:
    """Experts, from the `first` most popular on, that `tokens` tokens choose at least once, in expectation.

    >>> round(distinct_experts(256, 8, 32), 1)
    163.3
    """
    if skew == 0:
        return float((experts - first) * (1 - (1 - chosen / experts) ** tokens))
    return float(sum(1 - (1 - share) ** tokens for share in expert_shares(experts, chosen, skew)[first:]))


def expert_shares(experts: int, chosen: int, skew: float) -> tuple[float, ...]:
    """Probability that a token chooses each expert, the most popular first; they add up to `chosen`.

    An expert is chosen by a token at most once: what would go beyond is spread over the others.
    """
    weights = [rank**-skew for rank in range(1, experts + 1)]
    found: list[float] = []
    left, total = float(chosen), sum(weights)
    for weight in weights:
        share = min(1.0, left * weight / total)
        found.append(share)
        left, total = left - share, total - weight
    return tuple(found)
