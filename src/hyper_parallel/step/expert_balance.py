"""Expert load balancing between the steps of a run: loads are counted, and experts placed anew by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.errors import StrategyError
from hyper_parallel.shard import ShardedModel
from hyper_parallel.shard.experts.loads import by_layer, move_experts, take_loads
from hyper_parallel.shard.experts.placement import Placement, heaviest, place, replicas_needed
from hyper_parallel.step.optimizer import Optimizer
from hyper_parallel.strategy.strategy import ExpertBalance
from hyper_parallel.units import format_bytes


@dataclass(frozen=True)
class Replacement:
    """Experts that were placed anew."""

    before: float
    """The heaviest rank's rows over the mean, in the layer where it is the largest, in the steps counted."""
    after: float
    """The same, had experts been where they are now."""
    experts: int
    """Experts of all layers that are on another rank than before."""
    replicas: int
    """Replicas of all layers that are of another expert than before."""
    moved: int
    """Bytes of weights and optimizer state that crossed between ranks, over all ranks."""
    needed: int | None
    """Replicas in each layer that would keep the limit; None where these do."""

    def __str__(self) -> str:
        more = ""
        if self.needed is not None:
            more = f"; strategy.expert_balance.replicas: {self.needed} would keep the limit"
        return (
            f"experts placed anew: the heaviest rank's rows from {self.before:.2f} to {self.after:.2f} times the mean; "
            f"{self.experts} experts moved ({format_bytes(self.moved)}), {self.replicas} replicas changed{more}"
        )


class ExpertBalancer:
    """Counts the rows that experts get, and places them anew after `strategy.expert_balance.every` steps."""

    def __init__(self, handle: ShardedModel, optimizer: Optimizer, settings: ExpertBalance) -> None:
        """Raises StrategyError for an optimizer whose state of experts is not laid out as they are."""
        assert handle.routing is not None
        self._handle, self._optimizer, self._settings = handle, optimizer, settings
        self._routing, self._ranks = handle.routing, handle.mesh.size("expert")
        self._loads: list[float] | None = None
        self._steps = 0
        self._state()

    @classmethod
    def of(cls, handle: ShardedModel, optimizer: Optimizer) -> ExpertBalancer | None:
        """That of a run; None where its strategy does not ask for one."""
        settings = handle.strategy.expert_balance
        return None if settings is None else cls(handle, optimizer, settings)

    def after_step(self, loads: Sequence[float] | None = None) -> Replacement | None:
        """Count a step's `loads` (`StepResult.expert_loads`; in a loop of your own leave them out), and place experts
        anew where it is time and the limit is exceeded; None where all stay. A collective, after the update, when
        gradients are cleared."""
        if loads is None:
            loads = self._handle.over_all_ranks(take_loads(self._handle)).tolist()
        before = self._loads or [0.0] * len(loads)
        self._loads = [some + more for some, more in zip(before, loads, strict=True)]
        self._steps += 1
        if self._steps < self._settings.every:
            return None
        # Ranks choose alike, since they see the same numbers: also where a sum was rounded in another order.
        seen = torch.tensor(self._loads, dtype=torch.float64, device=self._handle.device)
        counted = by_layer(self._handle, self._handle.over_all_ranks(seen, "max").tolist())
        self._loads, self._steps = None, 0
        return self._placed(counted)

    def _placed(self, counted: Mapping[str, list[int]]) -> Replacement | None:
        limit, ranks, old = self._settings.limit, self._ranks, dict(self._routing.placements)
        new = {name: place(load, old[name], ranks, limit) for name, load in counted.items()}
        changed = {name: one for name, one in new.items() if one != old[name]}
        after = max(heaviest(load, new[name], ranks) for name, load in counted.items())
        if not changed:
            return None
        needed = None
        if after > limit:
            more = self._settings.replicas + 1
            needed = max(replicas_needed(load, ranks, limit, more) for load in counted.values())
        return Replacement(
            before=max(heaviest(load, old[name], ranks) for name, load in counted.items()),
            after=after,
            experts=sum(_elsewhere(old[name], one, ranks) for name, one in changed.items()),
            replicas=sum(len(set(one.replicas) - set(old[name].replicas)) for name, one in changed.items()),
            moved=self._move(changed),
            needed=needed,
        )

    def _move(self, placements: Mapping[str, Placement]) -> int:
        moved = move_experts(self._handle, placements, self._state())
        self._state()
        return moved

    def _state(self) -> dict[str, list[Tensor]]:
        """Name of an experts' parameter to the optimizer's tensors that are laid out as it is."""
        modules = tuple(f"{name}." for name in self._routing.experts)
        layouts = {one.name: one.layout for one in self._handle.owned() if one.name.startswith(modules)}
        found: dict[str, list[Tensor]] = {name: [] for name in layouts}
        for name, piece in self._optimizer.pieces().items():
            _, _, parameter = name.removeprefix("optimizer.").partition(".")
            if parameter not in layouts:
                continue
            if piece.layout != layouts[parameter]:
                raise StrategyError(
                    f"expert_balance: the optimizer {type(self._optimizer).__name__} lays {name!r} out as "
                    f"{piece.layout}, and the experts are {layouts[parameter]}; let `pieces` read "
                    "ShardedParameter.layout, or leave expert_balance out"
                )
            found[parameter].append(piece.local)
        return found

    # Checkpoints.

    def state(self) -> dict[str, Any]:
        """Where experts are and what was counted, as JSON-able values: a resumed run goes on with both."""
        placements = self._routing.placements.items()
        return {
            "ranks": self._ranks,
            "order": {name: list(one.order) for name, one in placements},
            "replicas": {name: list(one.replicas) for name, one in placements},
            "loads": self._loads,
            "steps": self._steps,
        }

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Place experts as `state` said, in a run of the same number of ranks and replicas; else where they are now.
        A collective, when parameters and optimizer have their values.

        Raises KeyError, TypeError or ValueError for what `state` did not give.
        """
        self._loads, self._steps = None, 0
        if state is None:
            return
        old = self._routing.placements
        found = {
            name: _read(state["order"][name], state["replicas"][name], len(one.order))
            for name, one in old.items()
        }
        alike = all(len(found[name].replicas) == len(one.replicas) for name, one in old.items())
        if state["ranks"] != self._ranks or not alike:
            return
        self._steps = int(state["steps"])
        if state["loads"] is not None:
            self._loads = [float(load) for load in state["loads"]]
            if len(self._loads) != sum(len(one.order) for one in found.values()):
                raise ValueError("loads of other experts")
        self._move({name: one for name, one in found.items() if one != old[name]})


def _elsewhere(old: Placement, new: Placement, ranks: int) -> int:
    """How many experts are on another rank."""
    local = len(old.order) // ranks
    before = {expert: place // local for place, expert in enumerate(old.order)}
    return sum(before[expert] != place // local for place, expert in enumerate(new.order))


def _read(order: Any, replicas: Any, experts: int) -> Placement:
    found = Placement(tuple(map(int, order)), tuple(map(int, replicas)))
    chosen = set(found.replicas)
    if sorted(found.order) != list(range(experts)) or len(chosen) != len(found.replicas):
        raise ValueError(f"no placement of {experts} experts")
    if not chosen <= set(range(experts)):
        raise ValueError(f"replicas of other than {experts} experts")
    return found
