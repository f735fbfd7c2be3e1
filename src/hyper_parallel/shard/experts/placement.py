"""Placement of experts on the ranks of the expert axis by measured loads, and the same as tensors of a graph.

With E experts on n ranks, each rank owns E/n. An expert with a replica is computed on every rank where its rows are,
so that each computes about 1/n of them; every other expert's rows go to its owner. With load l_e of expert e, R the
experts that have replicas, and O_r those that rank r owns,

    rows of rank r = Σ_{e in R} l_e / n + Σ_{e in O_r, not in R} l_e               `heaviest`: the largest over the mean

A replica costs the bytes of an expert's weights in each forward pass and spares the exchange of its rows; an owner
costs nothing once it is chosen, and the bytes of weights and optimizer state when it changes. So the number of replicas
is given, the hottest experts have them, and owners change only where the limit is exceeded (`place`): from where
experts are, the heaviest rank exchanges one of its experts with another rank's, that pair which leaves the smaller
maximum of both ranks, until the goal is reached or no exchange helps. Where that ends above the limit, it begins again
from a packing by decreasing load (LPT; EPLB packs so too), and the better one is taken. Experts stay where that gains
less than a third of what the limit allows above the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from hyper_parallel.compat.local_tensor import each_rank, one_device, per_rank
from hyper_parallel.compat.memory import present

_GAIN = 1 / 3
"""The least gain for which experts move, as a share of what the limit allows above the mean."""

_Loads = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True)
class Placement:
    """Where the experts of one layer are."""

    order: tuple[int, ...]
    """The expert at each of the E places; the first E/n places are those of the first rank."""
    replicas: tuple[int, ...] = ()
    """The experts that have replicas, ascending."""

    @classmethod
    def initial(cls, experts: int, replicas: int) -> Placement:
        """The model's own order; without loads the first experts have the replicas."""
        return cls(tuple(range(experts)), tuple(range(replicas)))


def rows_of_ranks(loads: Sequence[float], placement: Placement, ranks: int) -> _Loads:
    """[n]: the rows that each rank of the expert axis computes, where all ranks have equal shares of every load."""
    rest, shared = _split(loads, placement.replicas)
    owned: _Loads = rest[np.array(placement.order)].reshape(ranks, -1).sum(1) + shared / ranks
    return owned


def heaviest(loads: Sequence[float], placement: Placement, ranks: int) -> float:
    """The heaviest rank's rows over the mean; 1 where there are none."""
    rows = rows_of_ranks(loads, placement, ranks)
    return float(rows.max() / rows.mean()) if rows.sum() else 1.0


def place(loads: Sequence[float], current: Placement, ranks: int, limit: float) -> Placement:
    """The placement for these loads, [E], with as many replicas as `current`; `current` itself where its heaviest rank
    is within `limit` times the mean. A function of the arguments alone, equal on every rank."""
    if heaviest(loads, current, ranks) <= limit:
        return current
    by_load = sorted(range(len(loads)), key=lambda expert: (-loads[expert], expert))
    hot = tuple(sorted(by_load[: len(current.replicas)]))
    rest, shared = _split(loads, hot)
    mean = float(np.sum(loads)) / ranks
    # Halfway to the limit leaves room for loads that change.
    goal = (1 + limit) / 2 * mean - shared / ranks
    found = Placement(_exchanged(rest, current.order, ranks, goal), hot)
    if heaviest(loads, found, ranks) > limit:
        packed = Placement(_exchanged(rest, _packed(rest, ranks), ranks, goal), hot)
        found = min(found, packed, key=lambda one: heaviest(loads, one, ranks))
    gain = heaviest(loads, current, ranks) - heaviest(loads, found, ranks)
    return found if gain >= _GAIN * (limit - 1) else current


def replicas_needed(loads: Sequence[float], ranks: int, limit: float, least: int = 0) -> int:
    """The smallest number of replicas, `least` or more, with which the heaviest rank is within `limit` times the
    mean."""
    for replicas in range(least, len(loads)):
        found = place(loads, Placement.initial(len(loads), replicas), ranks, limit)
        if heaviest(loads, found, ranks) <= limit:
            return replicas
    return len(loads)


def _split(loads: Sequence[float], replicas: Sequence[int]) -> tuple[_Loads, float]:
    """Loads that go to owners, 0 for experts with replicas; the sum of those that stay."""
    rest = np.array(loads, dtype=np.float64)
    shared = float(rest[list(replicas)].sum())
    rest[list(replicas)] = 0
    return rest, shared


def _packed(rest: _Loads, ranks: int) -> tuple[int, ...]:
    """By decreasing load, each expert to the lightest rank that has a place left."""
    room = len(rest) // ranks
    owned: list[list[int]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for expert in sorted(range(len(rest)), key=lambda e: (-rest[e], e)):
        rank = min((r for r in range(ranks) if len(owned[r]) < room), key=lambda r: (load[r], r))
        owned[rank].append(expert)
        load[rank] += float(rest[expert])
    return tuple(expert for experts in owned for expert in sorted(experts))


def _exchanged(rest: _Loads, order: Sequence[int], ranks: int, goal: float) -> tuple[int, ...]:
    """The order after exchanges of the heaviest rank with others, until it has at most `goal` rows or none helps."""
    owned = np.array(order).reshape(ranks, -1)
    while True:
        loads = rest[owned]
        rows = loads.sum(1)
        heavy = int(rows.argmax())
        if rows[heavy] <= goal:
            break
        # [place on the heaviest rank, other rank, place there]: the rows that one gives the other.
        given = loads[heavy][:, None, None] - loads[None]
        larger = np.maximum(rows[heavy] - given, rows[None, :, None] + given)
        larger[:, heavy] = np.inf
        mine, rank, theirs = np.unravel_index(int(larger.argmin()), larger.shape)
        if larger[mine, rank, theirs] >= rows[heavy]:
            break
        owned[heavy, mine], owned[rank, theirs] = owned[rank, theirs], owned[heavy, mine]
    return tuple(int(expert) for expert in owned.flatten())


# Places of experts as tensors, so that one graph serves every placement.
#
# | tensor | what |
# |---|---|
# | `keys`, int64[E] | expert to the key by which its rows are sorted: its place p < E, or E + j for the replica j |
# | `replicas`, int64[K] | the place of each expert that has a replica |
#
# Rank r of the expert axis owns the places r · E/n to (r + 1) · E/n. Where experts are placed by their loads, the
# tensors are buffers of the experts module, written between steps.

_KEYS, _REPLICAS = "expert_keys", "expert_replica_places"


class Places(NamedTuple):
    """Where each expert's rows are computed."""

    keys: torch.Tensor
    replicas: torch.Tensor

    @classmethod
    def fixed(cls, experts: int, replicas: tuple[int, ...], device: torch.device) -> Places | None:
        """Experts in the model's order; these have replicas. None where none has, and no table is needed."""
        if not replicas:
            return None
        keys = torch.arange(experts, device=device)
        for at, expert in enumerate(replicas):
            keys[expert] = experts + at
        return cls(keys, torch.tensor(replicas, dtype=torch.int64, device=device))

    @classmethod
    def of(cls, module: nn.Module) -> Places:
        """The places that `add_places` gave a module."""
        keys, replicas = module._buffers[_KEYS], module._buffers[_REPLICAS]
        assert keys is not None
        assert replicas is not None
        return cls(keys, replicas)


def add_places(module: nn.Module, experts: int, replicas: int, device: torch.device) -> None:
    """Give an experts module the buffers, for the model's own order of experts; not part of its state dict."""

    def zeros(length: int) -> torch.Tensor:
        return per_rank(lambda _: torch.zeros(length, dtype=torch.int64, device=device))

    module.register_buffer(_KEYS, zeros(experts), persistent=False)
    module.register_buffer(_REPLICAS, zeros(replicas), persistent=False)
    if device.type != "meta":
        set_places(module, Placement.initial(experts, replicas))


def set_places(module: nn.Module, placement: Placement) -> None:
    """Write a placement into a module's buffers."""
    experts = len(placement.order)
    place_of = {expert: place for place, expert in enumerate(placement.order)}
    keys = [place_of[expert] for expert in range(experts)]
    for at, expert in enumerate(placement.replicas):
        keys[expert] = experts + at
    values = (keys, [place_of[expert] for expert in placement.replicas])
    for buffer, numbers in zip(Places.of(module), values, strict=True):
        with present(buffer, changed=True), one_device():
            for local in each_rank(buffer).values():
                local.copy_(torch.tensor(numbers, dtype=torch.int64))
