"""The tensor axes taken as one (1D): how modules are split over them.

Megatron-LM (arXiv 1909.08053, section 3); with the sequence split between regions, arXiv 2205.05198.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from hyper_parallel.errors import StrategyError
from hyper_parallel.layout.layout import chunk
from hyper_parallel.shard.lora_adapters import adapters_of, base_of, is_adapted
from hyper_parallel.shard.model_structure import (
    Heads,
    dim_of_features,
    features_of,
    fused_parts,
    has_encoder,
    heads_in_encoder,
    heads_of,
    is_by_head,
    is_inside,
    is_norm,
    is_projection,
    is_transformers,
    layers_or_refuse,
    owns_parameters,
)
from hyper_parallel.shard.plan.plan import Intervals, ModulePlan, PlanBuilder, Region
from hyper_parallel.shard.rules import pairs_of
from hyper_parallel.shard.tensor.norm import formula_of, width_of
from hyper_parallel.strategy.strategy import RuleName


def plan_tensor(draft: PlanBuilder) -> None:
    """Add what the tensor axes, taken as one, do to every module that a rule names."""
    _TensorPlanner(draft).plan()


class _TensorPlanner:
    """Makes the plan of the tensor axis, module by module."""

    def __init__(self, draft: PlanBuilder) -> None:
        self.draft, self.mesh, self.rules = draft, draft.mesh, draft.rules
        self.pairs = pairs_of(draft.rules)
        self.axis = draft.mesh.tensor
        self.size = draft.mesh.size(self.axis)
        # 2D, which takes its regions from this plan, splits the sequence too.
        self.sequence = draft.strategy.sequence or draft.mesh.size("tensor_y") > 1
        self.why = "sequence: true" if draft.strategy.sequence else "axes.tensor_y"
        """What the user asked for that splits the sequence."""
        self.model, self.config, self.names = draft.model, draft.config, draft.names
        self.decided: set[tuple[str, str]] = set()
        """(module, own name) of every parameter that was decided on."""

    def plan(self) -> None:
        if not self.rules:
            raise StrategyError(
                f"axes.tensor is {self.size}, but no rule says how {type(self.model).__name__} is split; "
                "give strategy.rules, for example {'*.up': colwise, '*.down': rowwise}"
            )
        self.encodes = is_transformers(self.model) and has_encoder(self.model)
        if self.sequence:
            if not is_transformers(self.model):
                raise StrategyError(f"{self.why} is understood for Transformers models only; leave it out")
            if self.encodes:
                raise StrategyError(
                    f"{self.why} splits the positions of decoder-only language models, and "
                    f"{type(self.model).__name__} has an encoder; leave it out"
                )
            self.draft.layers, _ = layers_or_refuse(self.model, self.why)
            self.draft.sequence = True
        self._check_partners()
        self._find_regions()
        for name, rule in self.rules.items():
            self._module(name, self.names[name], rule)
        if self.sequence:
            assert self.draft.layers is not None
            self._sequence(self.draft.layers)
        self._check_ties()

    def _check_ties(self) -> None:
        """Every module that owns a split weight must know that it is split."""
        for name, module in self.names.items():
            for own, parameter in module._parameters.items():
                if parameter is None or (name, own) in self.decided or name in self.draft.experts:
                    continue
                tied = self.draft.parameters[self.draft.known[id(parameter)]]
                if self.axis in tied.layout.split_axes:
                    raise StrategyError(
                        f"'{name}.{own}' is tied to {tied.name!r}, which is split as {tied.layout}; "
                        f"give {name!r} a rule in strategy.rules that splits it the same way"
                    )

    def _set(self, name: str, own: str, **decision: Any) -> None:
        self.draft.set(name, own, **decision)
        self.decided.add((name, own))

    # Which modules belong together.

    def _rule_of(self, name: str) -> RuleName | None:
        """The rule of a module; inside of a layer with adapters, that of the layer."""
        layer = self._adapted(name)
        return self.rules.get(name if layer is None else layer)

    def _adapted(self, name: str) -> str | None:
        """The layer with adapters that a module is a part of."""
        above = name.rpartition(".")[0]
        while above and not is_adapted(self.names[above]):
            above = above.rpartition(".")[0]
        return above or None

    def _check_partners(self) -> None:
        for name, rule in self.rules.items():
            partner = {"colwise": "rowwise", "rowwise": "colwise"}.get(rule)
            if partner and name not in self.pairs:
                other = (
                    "its output would stay split; use colwise_gather"
                    if rule == "colwise"
                    else "its input is not split"
                )
                raise StrategyError(
                    f"{name!r} is {rule}, but nothing beside it is {partner}: {other}, or replicate"
                )

    def _find_regions(self) -> None:
        """Attention and MLP modules of Transformers models, whose input feeds their projections alone."""
        if not is_transformers(self.model):
            return
        if self.encodes:
            self._find_attention_of_encoders()
            return
        for name, rule in self.rules.items():
            if rule != "rowwise":
                continue
            parent = name.rpartition(".")[0]
            if self.pairs.get(name) != parent:
                continue
            module = self.names[parent]
            heads = heads_of(module, self.config)
            if heads is None and parent.rpartition(".")[0] == self.draft.layers:
                # Projections that lie in a layer itself, beside its residual: each is entered by itself.
                self._check_between(parent, name)
                continue
            by_head = [own for own, p in module._parameters.items() if heads and is_by_head(p, heads)]
            for own in by_head:
                self._set(parent, own, split=[(0, self.axis, None)])
            for child, leaf in module.named_modules(prefix=parent):
                own = [p for p, value in leaf._parameters.items() if value is not None]
                if child == parent:
                    own = [p for p in own if p not in by_head]
                if own and self._rule_of(child) is None:
                    self._refuse_between(child, leaf)
            gathered = self.draft.strategy.memory.gathered
            keeps = gathered == "keep" or (gathered == "mlp" and heads is None)
            self.draft.regions[parent] = Region(heads, "gather" if self.sequence else "copy", keeps)

    def _find_attention_of_encoders(self) -> None:
        """Attention with split projections. What another stack made may enter it too, so that activations enter at each
        projection; weights with an element for each head, as a bias by position has, are split like them."""
        for parent in sorted({n.rpartition(".")[0] for n, r in self.rules.items() if r == "colwise"}):
            heads = heads_in_encoder(self.names[parent])
            if heads is None:
                continue
            self.draft.regions[parent] = Region(heads, "as it is")
            for child, leaf in self.names[parent].named_modules(prefix=parent):
                if self._rule_of(child) is not None:
                    continue
                if isinstance(leaf, nn.Embedding) and leaf.embedding_dim == heads.query:
                    self._set(child, "weight", split=[(1, self.axis, None)])
                elif owns_parameters(leaf):
                    self._refuse_between(child, leaf)
        for name, rule in self.rules.items():
            if rule == "rowwise":
                for beside in sorted(
                    {n.rpartition(".")[0] for n, p in self.pairs.items() if p == self.pairs[name]}
                ):
                    self._check_between(beside, name)

    def _check_between(self, layer: str, rowwise: str) -> None:
        """Refuse weights of a module that lie between projections: those of as many features as are there."""
        features, hidden = (features_of(self.names[rowwise], output) for output in (False, True))
        for child, leaf in self.names[layer].named_children():
            widths = {int(p.shape[-1]) for p in leaf._parameters.values() if p is not None and p.dim() == 1}
            if features != hidden and features in widths and self._rule_of(f"{layer}.{child}") is None:
                raise StrategyError(
                    f"the weights of '{layer}.{child}' have one element for each of the {features} features between "
                    f"split projections, and no rule says what they see; in strategy.rules give {rowwise!r}, and "
                    "the projections that feed it, replicate"
                )

    def _refuse_between(self, name: str, module: nn.Module) -> None:
        own = [p for p, value in module._parameters.items() if value is not None]
        raise StrategyError(
            f"the weights {own} of {name!r} lie between split projections and no rule says what they see; "
            "give strategy.rules: shared if they are applied to split activations, replicate if not"
        )

    # One module.

    def _module(self, name: str, module: nn.Module, rule: RuleName) -> None:
        if rule in ("replicate", "expert", "expert_tensor"):
            return
        if rule == "shared":
            for part, leaf in module.named_modules(prefix=name):
                for own in leaf._parameters:
                    self._set(part, own, summed=(self.axis,))
            return
        self._refuse_computed(name, module, rule)
        if rule == "vocab":
            self._vocabulary(name, module)
            return
        if rule == "norm":
            self._norm(name, module)
            return
        if not is_projection(module):
            raise StrategyError(
                f"{name!r} is a {type(module).__name__}; the rule {rule!r} splits nn.Linear and Conv1D only"
            )
        if rule == "rowwise":
            self._rowwise(name, module)
        else:
            self._colwise(name, module, rule)

    def _refuse_computed(self, name: str, module: nn.Module, rule: RuleName) -> None:
        """Raise StrategyError where what a rule splits is computed from other parameters."""
        for part, leaf in module.named_modules(prefix=name):
            computed = isinstance(leaf, ParametrizationList) or any(
                f"{own}_{part}" in leaf._parameters
                for own in ("weight", "bias")
                for part in ("g", "v", "orig")
            )
            if computed:
                raise StrategyError(
                    f"the rule {rule!r} splits a weight of {name!r}, which is computed from other parameters "
                    "(parametrizations, weight norm, spectral norm); in strategy.rules give it, and what its output "
                    "feeds, replicate"
                )

    def _norm(self, name: str, module: nn.Module) -> None:
        """A norm over features that are split: so are its weights, and its statistics are summed."""
        width = width_of(module)
        if width is None:
            raise StrategyError(
                f"{name!r} is a {type(module).__name__}; the rule 'norm' is for norms with one weight for each "
                f"feature; in strategy.rules give {{{name!r}: replicate}}"
            )
        for own in module._parameters:
            self._set(name, own, split=[(0, self.axis, None)])
        self.draft.modules[name] = ModulePlan("norm", features=width, formula=formula_of(name, module, width))

    def _colwise(self, name: str, module: nn.Module, rule: RuleName) -> None:
        parent = name.rpartition(".")[0]
        region = self.draft.regions.get(parent)
        dim, features = dim_of_features(base_of(module), output=True), features_of(module, output=True)
        inside = region is not None and rule == "colwise"
        heads = region.heads if region is not None and inside else None
        loose = self.sequence and rule == "colwise" and parent.rpartition(".")[0] == self.draft.layers
        parts = fused_parts(name, features, self.names[parent], heads) if inside else (features,)
        intervals = self._by_head(name, parts, heads) if heads is not None else None
        split = [(self._base_name(name), "weight", dim), (self._base_name(name), "bias", 0)]
        for adapter in adapters_of(module):
            self._set(f"{name}.lora_A.{adapter.name}", "weight", summed=(self.axis,))
            split += [(f"{name}.lora_B.{adapter.name}", own, 0) for own in ("weight", "bias")]
        for owner, own, d in split:
            if self.names[owner]._parameters.get(own) is None:
                continue
            if intervals is not None:
                self._set(owner, own, summed=(self.axis,), chosen=(d, intervals))
            else:
                self._set(owner, own, split=[(d, self.axis, parts)])
        entered = region is not None and inside and region.enters != "as it is"
        self.draft.modules[name] = ModulePlan(
            rule,
            enters="as it is" if entered else "gather" if loose else "copy",
            leaves="gather" if rule == "colwise_gather" else "as it is",
            features=features,
            pair=self.pairs.get(name, ""),
        )

    def _base_name(self, name: str) -> str:
        return f"{name}.base_layer" if is_adapted(self.names[name]) else name

    def _by_head(self, name: str, parts: tuple[int, ...], heads: Heads) -> tuple[Intervals, ...] | None:
        """None when the tensor axis splits every part by whole heads; else what each rank computes with.

        With fewer key-value heads than ranks, a rank takes the head that its query heads attend with, and the
        projection is stored whole (on each rank of the tensor axis).
        """
        counts = [length / heads.size for length in parts]
        by_latent = heads.latent and sum(parts) % heads.query == 0
        if not by_latent and any(count not in (heads.query, heads.kv) for count in counts):
            raise StrategyError(
                f"{name!r} has {sum(parts)} output features, which is neither {heads.query} query heads nor "
                f"{heads.kv} key-value heads of {heads.size}; give strategy.rules for it"
            )
        if heads.query % self.size:
            raise StrategyError(
                f"{name!r}: {heads.query} attention heads cannot be split over axes.tensor = {self.size}; use a divisor"
            )
        if heads.kv % self.size == 0:
            return None
        if self.size % heads.kv:
            raise StrategyError(
                f"{name!r}: {heads.kv} key-value heads over axes.tensor = {self.size}: one must divide the other; "
                f"use a divisor of {heads.kv}, or a multiple of it that divides {heads.query}"
            )
        if len(parts) == 1 and counts[0] == heads.query:
            return None
        return tuple(self._heads_of_rank(parts, heads, index) for index in range(self.size))

    def _heads_of_rank(self, parts: tuple[int, ...], heads: Heads, index: int) -> Intervals:
        chosen, at = [], 0
        for part, length in enumerate(parts):
            is_query = len(parts) > 1 and part == 0
            if is_query:
                start, stop = chunk(length, self.size, index)
            else:
                start = index * heads.kv // self.size * heads.size
                stop = start + heads.size
            chosen.append((at + start, at + stop))
            at += length
        return tuple(chosen)

    def _rowwise(self, name: str, module: nn.Module) -> None:
        base, dim = self._base_name(name), dim_of_features(base_of(module), output=False)
        self._set(base, "weight", split=[(dim, self.axis, None)])
        for adapter in adapters_of(module):
            if adapter.b.bias is not None:
                raise StrategyError(
                    f"{name!r} is rowwise and its adapter has a bias, which would be summed over the ranks; "
                    "use lora_bias=False, or tensor: 1"
                )
            self._set(f"{name}.lora_A.{adapter.name}", "weight", split=[(1, self.axis, None)])
            self._set(f"{name}.lora_B.{adapter.name}", "weight", summed=(self.axis,))
        self.draft.modules[name] = ModulePlan(
            "rowwise",
            leaves="reduce_split" if self.sequence else "reduce",
            features=features_of(module, output=False),
            pair=self.pairs[name],
        )

    def _vocabulary(self, name: str, module: nn.Module) -> None:
        if not isinstance(module, nn.Embedding):
            raise StrategyError(
                f"{name!r} is a {type(module).__name__}; the rule 'vocab' splits nn.Embedding only"
            )
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            raise StrategyError(
                f"{name!r}: max_norm, sparse and scale_grad_by_freq need the whole embedding; "
                "give it the rule replicate"
            )
        self._set(name, "weight", split=[(0, self.axis, None)])
        self.draft.modules[name] = ModulePlan("vocab", leaves="reduce")

    # Activations split along the sequence between regions.

    def _sequence(self, layers: str) -> None:
        """Classify the children of each layer: one that sees one position at a time, or is a region that gathers them,
        stays as it is; any other may mix positions in its own way and gets all of them."""
        for index, layer in self.names[layers].named_children():
            name = f"{layers}.{index}"
            leaves = [child for child, module in layer.named_children() if not list(module.children())]
            if not self._decided(name) or any(not self._by_position(f"{name}.{leaf}") for leaf in leaves):
                self._give_all_positions(name)
                continue
            for child, module in layer.named_children():
                full = f"{name}.{child}"
                if self._by_position(full):
                    self._sum(full, module)
                else:
                    self._give_all_positions(full)

    def _by_position(self, name: str) -> bool:
        """Whether a module sees one position at a time, apart from regions, which see to it themselves."""
        module = self.names[name]
        if name in self.draft.regions or name in self.draft.experts or name in self.draft.pointwise:
            return True
        if self._rule_of(name) is not None or not any(True for _ in module.parameters()):
            return True
        children = [f"{name}.{child}" for child, _ in module.named_children()]
        if not children:
            return is_norm(module)
        if heads_of(module, self.config) is not None or not self._decided(name):
            return False
        return all(self._by_position(child) for child in children)

    def _decided(self, name: str) -> bool:
        """Whether something is known of every weight of a module's own."""
        return all(
            parameter is None or (name, own) in self.decided
            for own, parameter in self.names[name]._parameters.items()
        )

    def _sum(self, name: str, module: nn.Module) -> None:
        """Ranks compute with other positions: of weights that are whole, each has a term of the gradient."""
        for child, leaf in module.named_modules(prefix=name):
            if child not in self.draft.experts:
                for own in leaf._parameters:
                    if (child, own) not in self.decided:
                        self._set(child, own, summed=(self.axis,))
                        self.draft.by_position.add((child, own))

    def _give_all_positions(self, name: str) -> None:
        if any(is_inside(experts, name) for experts in self.draft.experts):
            raise StrategyError(
                f"{self.why} gives {name!r} ({type(self.names[name]).__name__}) all positions, since it may mix "
                "them in its own way, and the experts in it need different tokens on each rank; leave it out"
            )
        self.draft.give_all_positions(name)
