"""Expert-parallel plan of a mixture-of-experts layer.

| rule | weights | tokens |
|---|---|---|
| `expert` | dim 0, the experts, split over the expert axis | travel to the owners of their experts |
| `expert_tensor` | features split over the tensor axes; dim 0 too over expert | all tensor ranks compute all |
| `replicate` | whole | stay where they are |

Experts are modules that Transformers' ``use_experts_implementation`` made: one weight holds all of a layer's experts
on dim 0, and the modules call one function of (hidden states, chosen experts, their weights).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from hyper_parallel.errors import StrategyError
from hyper_parallel.layout.layout import chunk
from hyper_parallel.shard.experts.placement import Placement
from hyper_parallel.shard.model_structure import is_inside, owns_parameters
from hyper_parallel.shard.plan.plan import ExpertsPlan, Intervals, PlanBuilder, Split
from hyper_parallel.shard.rules import matching_or_refuse
from hyper_parallel.strategy.strategy import ExpertBalance, RuleName

_MADE_BY_DECORATOR = ("has_gate", "has_bias", "is_transposed", "_apply_gate")
_PROJECTIONS = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}


def is_experts(module: nn.Module) -> bool:
    """Whether the module is a layer's experts, made by Transformers' ``use_experts_implementation``."""
    return all(hasattr(module, name) for name in _MADE_BY_DECORATOR)


def is_concatenated(experts: nn.Module) -> bool:
    """Whether `gate_up_proj` holds all of gate before all of up, instead of interleaving them."""
    flag = getattr(experts, "is_concatenated", None)
    # Early releases of Transformers 5 (such as 5.6) lack the attribute, and only GPT-OSS interleaved them.
    return type(experts).__name__ != "GptOssExperts" if flag is None else bool(flag)


def plan_experts(draft: PlanBuilder) -> None:
    """Add what is done to experts, their routers and shared experts; before the tensor planner, which goes by rules.

    Raises StrategyError when the experts cannot be spread as the strategy says, with the reason.
    """
    _ExpertsPlanner(draft).plan()


class _ExpertsPlanner:
    def __init__(self, draft: PlanBuilder) -> None:
        self.draft, self.mesh, self.strategy = draft, draft.mesh, draft.strategy
        self.expert = draft.mesh.size("expert")
        self.tensor = draft.mesh.size(draft.mesh.tensor)
        self.own_tokens = self.tensor > 1 and (draft.strategy.sequence or draft.mesh.size("tensor_y") > 1)

    def plan(self) -> None:
        found = {name: module for name, module in self.draft.names.items() if is_experts(module)}
        self._check_rules(found)
        if self.expert > 1 and not found:
            raise StrategyError(
                f"axes.expert is {self.expert}, but {type(self.draft.model).__name__} has no experts that go through "
                "Transformers' experts interface; leave axes.expert out"
            )
        jitter = getattr(self.draft.config, "router_jitter_noise", 0.0)
        if found and jitter and self.mesh.world > 1:
            raise StrategyError(
                f"router_jitter_noise is {jitter}: the noise would differ from that of one device; set it to 0"
            )
        replicas = self._replicas(list(found))
        balance = self.strategy.expert_balance
        if balance is not None:
            self._check_balance()
        for name, module in found.items():
            rule = self._rule(name)
            if self.tensor > 1:
                self._beside(name)
            count = _count(name, module)
            if balance is not None:
                replicas[name] = self._slots(name, count, balance)
            plan = ExpertsPlan(
                rule,
                count=count,
                taken_over=self.mesh.world > 1 or self._is_odd(module),
                features=rule == "expert_tensor" and self.tensor > 1,
                own_tokens=self.own_tokens,
                replicas=replicas.get(name, ()),
                balanced=balance is not None,
            )
            self.draft.experts[name] = plan
            self._parameters(name, module, plan)
        self._check_alike()

    # Rules.

    def _check_rules(self, found: dict[str, nn.Module]) -> None:
        for name, rule in self.draft.rules.items():
            if rule in ("expert", "expert_tensor") and name in self.draft.given and name not in found:
                raise StrategyError(
                    f"strategy.rules: {name!r} is a {type(self.draft.names[name]).__name__}; the rule {rule!r} is for "
                    "experts that go through Transformers' experts interface"
                )

    def _rule(self, name: str) -> RuleName:
        """The rule of one experts module; taken out of the rules, which are then the tensor planner's."""
        given = self.draft.rules.pop(name, None) if name in self.draft.given else None
        self.draft.rules.pop(name, None)
        if given not in (None, "expert", "expert_tensor", "replicate"):
            raise StrategyError(
                f"strategy.rules: {given!r} does not apply to the experts {name!r}; "
                "they take expert, expert_tensor or replicate"
            )
        if given == "replicate" and self.expert > 1:
            raise StrategyError(
                f"strategy.rules: {name!r} is to be replicated, but axes.expert is {self.expert}; "
                "give it expert, or leave axes.expert out"
            )
        if given == "expert_tensor" and self.tensor == 1:
            raise StrategyError(
                f"strategy.rules: expert_tensor splits {name!r} over the tensor axes, which have degree 1"
            )
        if given == "expert" and self.expert == 1:
            raise StrategyError(
                f"strategy.rules: expert spreads {name!r} over axes.expert, which is 1; raise it"
            )
        whole = "expert_tensor" if self.tensor > 1 else "replicate"
        return given or ("expert" if self.expert > 1 else whole)  # type: ignore[return-value]

    def _is_odd(self, module: nn.Module) -> bool:
        """Whether torch's grouped product, which the model's own code would call, refuses the experts' widths, whose
        rows have to be multiples of 16 bytes."""
        sizes = [
            n * p.element_size() for p in module._parameters.values() if p is not None for n in p.shape[1:]
        ]
        implementation = getattr(self.draft.config, "_experts_implementation", None)
        return implementation == "grouped_mm" and any(size % 16 for size in sizes)

    def _replicas(self, found: list[str]) -> dict[str, tuple[int, ...]]:
        replicas: dict[str, tuple[int, ...]] = {}
        for pattern, ids in self.strategy.expert_replicas.items():
            if self.expert == 1:
                raise StrategyError("expert_replicas needs axes.expert above 1: every rank has all experts")
            for name in matching_or_refuse(pattern, found, "strategy.expert_replicas"):
                count = _count(name, self.draft.names[name])
                beyond = [i for i in ids if i >= count]
                if beyond:
                    raise StrategyError(
                        f"strategy.expert_replicas: {name!r} has {count} experts, from 0; got {beyond[0]}"
                    )
                replicas[name] = tuple(ids)
        return replicas

    def _check_balance(self) -> None:
        if self.expert == 1:
            raise StrategyError(
                "expert_balance needs axes.expert above 1: every rank has all experts; set axes.expert, or leave "
                "expert_balance out"
            )

    def _slots(self, name: str, count: int, balance: ExpertBalance) -> tuple[int, ...]:
        """The experts of one module that have replicas as long as no loads are known."""
        if self.draft.is_tied(name):
            raise StrategyError(
                f"expert_balance: {name!r} shares weights with another module, whose tokens it would have to place "
                "alike; leave expert_balance out"
            )
        if balance.replicas > count:
            raise StrategyError(
                f"strategy.expert_balance.replicas: {name!r} has {count} experts, and {balance.replicas} are to have "
                f"replicas; use at most {count}"
            )
        return Placement.initial(count, balance.replicas).replicas

    def _check_alike(self) -> None:
        """The expert axis folds over the tensor axes, or leaves them to features: for all layers alike."""
        rules = {plan.rule for plan in self.draft.experts.values()}
        if self.expert > 1 and len(rules) > 1:
            raise StrategyError(
                "strategy.rules: with axes.expert above 1 all experts take expert, or all take expert_tensor; got both"
            )

    # Parameters.

    def _parameters(self, name: str, module: nn.Module, plan: ExpertsPlan) -> None:
        if plan.count % self.expert:
            raise StrategyError(
                f"{name!r} has {plan.count} experts, which axes.expert = {self.expert} does not divide; use a divisor"
            )
        if plan.features and getattr(module, "has_post_expert_norm", False):
            raise StrategyError(
                f"{name!r} has a norm after each expert, which needs whole features: it cannot be split over the "
                f"tensor axes; give strategy.rules {{{name!r}: replicate}} or set axes.expert"
            )
        # A weight that is whole on ranks with different tokens gets a part of its gradient on each of them.
        summed = (self.mesh.tensor,) if self.own_tokens and not plan.features and self.expert == 1 else ()
        for own, parameter in module._parameters.items():
            if parameter is None:
                continue
            split: list[Split] = [(0, "expert", None)] if self.expert > 1 else []
            partial = summed
            chosen = None
            if plan.features:
                features = self._features(module, own, tuple(parameter.shape))
                chosen = self._pairs(module, own, tuple(parameter.shape))
                split += [features] if features is not None and chosen is None else []
                partial = () if features is not None and chosen is None else (self.mesh.tensor,)
            storage = "expert_shard" if self.expert > 1 else None
            dim = self._storage_dim(own, tuple(parameter.shape), split) if storage else 0
            self.draft.set(
                name, own, split=split, summed=partial, chosen=chosen, storage=storage, storage_dim=dim
            )
        for child, inner in module.named_modules(prefix=name):
            if child != name and self.tensor > 1 and (self.own_tokens or self.expert > 1):
                # Each rank applies it to its own rows.
                for own in inner._parameters:
                    self.draft.set(child, own, summed=(self.mesh.tensor,))
                self.draft.pointwise.add(child)

    def _features(self, module: Any, own: str, shape: tuple[int, ...]) -> Split | None:
        """How the tensor axes split one weight's features; None for the bias of the result, which is whole."""
        axis = self.mesh.tensor
        if own == "down_proj_bias":
            return None
        if own == "down_proj":
            return (1 if module.is_transposed else 2), axis, None
        dim = 1 if own.endswith("_bias") or not module.is_transposed else 2
        half = shape[dim] // 2
        return dim, axis, (half, half) if module.has_gate and is_concatenated(module) else None

    def _pairs(
        self, module: Any, own: str, shape: tuple[int, ...]
    ) -> tuple[int, tuple[Intervals, ...]] | None:
        """(dim, intervals of each rank) where gate and up are interleaved and the tensor axes do not divide the pairs;
        None everywhere else. The parameter is then stored whole, and each rank computes with the pairs that match its
        part of `down_proj`. Ranks with fewer pairs repeat the first ones, without effect: `down_proj` is padded with
        zeros."""
        if not module.has_gate or is_concatenated(module) or own.startswith("down_proj"):
            return None
        dim = 1 if own.endswith("_bias") or not module.is_transposed else 2
        pairs = shape[dim] // 2
        if pairs % self.tensor == 0:
            return None
        parts = [chunk(pairs, self.tensor, index) for index in range(self.tensor)]
        most = parts[0][1]
        return dim, tuple(((2 * a, 2 * b), (0, 2 * (most - (b - a)))) for a, b in parts)

    def _storage_dim(self, own: str, shape: tuple[int, ...], split: list[Split]) -> int:
        """0, or 1 where there are fewer local experts than ranks that share their storage, and dim 1 is divided."""
        ranks = self.mesh.size("expert_shard")
        tensor = self.tensor if any(dim == 1 for dim, _, _ in split) else 1
        even = len(shape) > 1 and shape[1] % (2 * tensor) == 0 and shape[1] // tensor % ranks == 0
        return 1 if shape[0] // self.expert < ranks and even else 0

    # What lies beside the experts in their block.

    def _beside(self, name: str) -> None:
        """Shared experts are split like any MLP; routers and gates see one token at a time and stay whole."""
        block = name.rpartition(".")[0]
        for path, module in self._outside(block, name):
            last = path.rsplit(".", 1)[-1]
            siblings = {n for n, _ in self.draft.names[path.rpartition(".")[0]].named_children()}
            if isinstance(module, nn.Linear) and siblings >= set(_PROJECTIONS) and last in _PROJECTIONS:
                self.draft.rules.setdefault(path, _PROJECTIONS[last])  # type: ignore[arg-type]
            elif path not in self.draft.rules:
                self.draft.pointwise.add(path)

    def _outside(self, block: str, experts: str) -> Iterator[tuple[str, nn.Module]]:
        for path, module in self.draft.names[block].named_modules(prefix=block):
            if owns_parameters(module) and not is_inside(path, experts):
                yield path, module


def _count(name: str, module: nn.Module) -> int:
    """The number of experts: dim 0 of every weight."""
    lengths = {p.shape[0] for p in module._parameters.values() if p is not None and p.dim() > 0}
    if len(lengths) != 1:
        raise StrategyError(
            f"the weights of {name!r} do not all have the experts on dim 0: {sorted(lengths)}"
        )
    return int(lengths.pop())
