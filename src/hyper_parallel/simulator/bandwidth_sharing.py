"""Bandwidth sharing among concurrent transfers.

Each transfer runs at a rate between 0 and 1 of its speed alone, and uses a share w of each resource (a link level of a
device, one direction of a tier) per unit of rate. Rates are max-min fair: all grow together until a resource is full;
the transfers on it stop there, and the others continue to grow (progressive filling: Bertsekas and Gallager, *Data
Networks*, 2nd edition, 1992, section 6.5.2).

    Σ_transfers w · rate ≤ 1        on every resource                              `fair`
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

Resource = Hashable
T = TypeVar("T", bound=Hashable)


def fair(uses: Mapping[T, Mapping[Resource, float]]) -> dict[T, float]:
    """The rate of each transfer, given the share of each resource that it uses when alone.

    >>> fair({"a": {"link": 1.0}, "b": {"link": 1.0}, "c": {"bus": 0.5}})
    {'c': 1.0, 'a': 0.5, 'b': 0.5}
    """
    rates: dict[T, float] = {}
    growing = dict(uses)
    left: dict[Resource, float] = {resource: 1.0 for use in uses.values() for resource in use}
    rate = 0.0
    while growing:
        loads: dict[Resource, float] = {}
        for use in growing.values():
            for resource, share in use.items():
                loads[resource] = loads.get(resource, 0.0) + share
        room = {resource: left[resource] / load for resource, load in loads.items() if load}
        step = min([1.0 - rate, *room.values()])
        rate += step
        for resource, load in loads.items():
            left[resource] -= step * load
        full = {resource for resource, most in room.items() if most == step}
        done = [one for one, use in growing.items() if rate >= 1.0 or any(use[r] and r in full for r in use)]
        for one in done:
            rates[one] = rate
            del growing[one]
    return rates


class Sharing(Generic[T]):
    """The running transfers. A change recomputes only the rates of transfers that share resources with it."""

    def __init__(self) -> None:
        self._uses: dict[T, Mapping[Resource, float]] = {}
        self._users: dict[Resource, dict[T, None]] = {}

    def add(self, one: T, use: Mapping[Resource, float]) -> dict[T, float]:
        """Begin a transfer; returns the new rates of it and of all transfers that share resources with it."""
        self._uses[one] = use
        alone = True
        for resource in use:
            users = self._users.setdefault(resource, {})
            alone = alone and not users
            users[one] = None
        return {one: 1.0} if alone else self._rates([one])

    def remove(self, one: T) -> dict[T, float]:
        """End a transfer; returns the new rates of all transfers that shared resources with it."""
        others: dict[T, None] = {}
        for resource in self._uses.pop(one):
            users = self._users[resource]
            del users[one]
            others.update(users)
        return self._rates(others) if others else {}

    def _rates(self, changed: Iterable[T]) -> dict[T, float]:
        reached: dict[T, Mapping[Resource, float]] = {}
        todo = list(changed)
        while todo:
            one = todo.pop()
            if one not in reached:
                reached[one] = self._uses[one]
                for resource in reached[one]:
                    todo.extend(self._users[resource])
        return fair(reached)
