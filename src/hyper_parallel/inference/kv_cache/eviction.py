"""Eviction by predicted next use: the prefix with the least retention index goes first.

How long a prefix waits for its next use is learned from those of its class, used or not: a life table over ages a, on
a logarithmic scale, with hazards h(a) = uses at age a / prefixes that reached it (Kaplan and Meier 1958, so that those
still waiting count). The index of a prefix of age a is the best rate of uses that keeping it for a while can have,

    index(a) = max over ends e of  P(used before e | a) / E(time kept until used or e | a)

which is Gittins' index (1979) of a page that pays 1 when it is used. The class is the prefix's own mean interval where
it was used `KNOWN` times or more, else how often it and the prefix that it continues were used. Time is counted in
requests: ranks that run the same requests evict the same prefixes. A prefix goes before those that it continues.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

KNOWN = 3
_AGES = 48
_REBUILD = 64
SAMPLE = 24
_CLEAR = 0.5


@dataclass
class _Life:
    """What is known of one prefix, in the cache or not."""

    parent: Hashable | None
    last: int
    uses: int = 1
    interval: float = 0.0
    """Mean number of requests between uses, of late."""
    cached: bool = False
    kept: int = 0
    """Prefixes in the cache that continue it, of those that are remembered."""


@dataclass
class _Table:
    """Of one class: uses by age, and the index by age."""

    uses: list[float] = field(default_factory=lambda: [0.0] * _AGES)
    index: list[float] = field(default_factory=lambda: [math.inf] * _AGES)


class PredictedUse:
    """Decides which prefixes stay, from the requests that it is shown."""

    def __init__(self, most: int = 1 << 16, seed: int = 0) -> None:
        """`most`: prefixes that are remembered, in the cache or not."""
        self._most = most
        self._lives: dict[Hashable, _Life] = {}
        self._tables: dict[tuple[int, ...], _Table] = {}
        self._draws = random.Random(seed)
        self._now = 0

    def used(self, keys: Sequence[Hashable]) -> None:
        """A request came whose prompt has these prefixes, each the continuation of the one before."""
        self._now += 1
        parent: Hashable | None = None
        for key in keys:
            life = self._lives.pop(key, None)
            if life is None:
                life = _Life(parent, self._now)
            else:
                wait = self._now - life.last
                self._table(life).uses[_age(wait)] += 1
                weight = 1 / min(life.uses, 4)
                life.interval += weight * (wait - life.interval)
                life.uses, life.last = life.uses + 1, self._now
            self._lives[key] = life
            parent = key
        for key in list(islice(self._lives, max(len(self._lives) - self._most, 0))):
            self._count(key, False)
            del self._lives[key]
        if self._now % _REBUILD == 0:
            self._rebuild()

    def entered(self, key: Hashable) -> None:
        """A prefix is in the cache."""
        self._count(key, True)

    def left(self, key: Hashable) -> None:
        """A prefix is not in the cache any more."""
        self._count(key, False)

    def first(self, candidates: Mapping[Hashable, object], some: Sequence[Hashable]) -> Hashable:
        """Of prefixes in the cache, the least recently used first, the one to evict. It looks at the least recently
        used ones and at `some` others: one of these goes first only if its index is far lower, since indexes are
        estimates.
        """
        sample = [*islice(candidates, SAMPLE), *some]
        leaves = [key for key in sample if key not in self._lives or not self._lives[key].kept]
        oldest, best = (leaves or sample)[0], min(leaves or sample, key=self.index)
        return best if self.index(best) < _CLEAR * self.index(oldest) else oldest

    def index(self, key: Hashable) -> float:
        """The retention index."""
        life = self._lives.get(key)
        return 0.0 if life is None else self._table(life).index[_age(self._now - life.last)]

    def _table(self, life: _Life) -> _Table:
        kind: tuple[int, ...]
        if life.uses >= KNOWN:
            kind = (_age(life.interval),)
        else:
            before = self._lives.get(life.parent)
            kind = (life.uses, _age(before.uses) if before is not None else -1)
        return self._tables.setdefault(kind, _Table())

    def _count(self, key: Hashable, cached: bool) -> None:
        life = self._lives.get(key)
        if life is None or life.cached == cached:
            return
        life.cached = cached
        if (parent := self._lives.get(life.parent)) is not None:
            parent.kept += 1 if cached else -1

    def _rebuild(self) -> None:
        """Make the indexes anew, and let old uses count less."""
        waiting: dict[int, list[int]] = {}
        for life in self._lives.values():
            table = self._table(life)
            waiting.setdefault(id(table), [0] * _AGES)[_age(self._now - life.last)] += 1
        for table in self._tables.values():
            table.index = _indexes(table.uses, waiting.get(id(table), [0] * _AGES))
            table.uses = [0.98 * count for count in table.uses]


def _age(time: float) -> int:
    """Ages on a logarithmic scale, two for each doubling."""
    return min(int(2 * math.log2(max(time, 1))), _AGES - 1)


def _width(age: int) -> float:
    return float(2 ** ((age + 1) / 2) - 2 ** (age / 2))


def _indexes(uses: Sequence[float], waiting: Sequence[int]) -> list[float]:
    """Index of each age, of a class with so many uses at each age and members that still wait."""
    reached, hazards = 0.0, [0.0] * _AGES
    for age in reversed(range(_AGES)):
        reached += uses[age] + waiting[age]
        # Half of those that wait at an age are at risk in it; a use more and one member more for what nobody saw yet.
        hazards[age] = (uses[age] + 0.02) / max(reached - waiting[age] / 2 + 1, 1)
    found = [0.0] * _AGES
    for age in range(_AGES):
        alive, used, time = 1.0, 0.0, 0.0
        for end in range(age, _AGES):
            hit = alive * min(hazards[end], 1)
            time += (alive - hit / 2) * _width(end)
            used, alive = used + hit, alive - hit
            found[age] = max(found[age], used / time)
            if alive < 1e-3:
                break
    return found
