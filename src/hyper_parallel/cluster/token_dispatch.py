"""Token dispatch: bytes that tokens take to their experts on each link level, with one copy of a token to each domain.

A token chooses c of the experts of R = d · k ranks: d in each domain of fast links (a node, or a supernode), k domains
on the network. An all-to-all sends a row for each expert. DeepEP and HybridEP send one row to each domain, which is
forwarded there to the ranks that need it (DeepSeek-V3, arXiv 2412.19437, section 3.2.2):

    destinations(p) = p (1 − (1 − 1/p)^c)         of p places, those that get a token            `destinations`
    network         = destinations(r) (1 − 1/k)   copies of a token, over the network
    inside          = destinations(r d) (1 − 1/d) copies of a token, over the links of a domain

r of the k domains can hold a token's experts, where it chooses groups of experts first (`reached`). The planner's
closed forms (`planner.cost_model.dispatch`) and the simulator take both functions from here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Number = Any
"""A float, or an array of floats."""
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
    """Of `places` that hold a token's possible experts equally, those that hold at least one of `chosen`."""
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
