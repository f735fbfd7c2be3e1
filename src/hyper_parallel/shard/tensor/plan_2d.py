"""2D tensor-parallel plan: which 1D regions are upgraded, and their weight layouts.

Every child of a layer is an attention or an MLP that 2D supports, a norm of the residual, a module without weights, or
a region that exchanges split features for split positions at its entry and runs the 1D plan inside.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from hyper_parallel.errors import StrategyError
from hyper_parallel.graph.likeness import signature
from hyper_parallel.shard.lora_adapters import is_adapted
from hyper_parallel.shard.model_structure import (
    Heads,
    dim_of_features,
    features_of,
    fused_parts,
    is_norm,
    is_projection,
    layers_or_refuse,
    owns_parameters,
)
from hyper_parallel.shard.plan.plan import Intervals, PlanBuilder, Split
from hyper_parallel.shard.tensor.factorization import Attention, Mlp, Tensor2D, choose_mlp
from hyper_parallel.shard.tensor.norm import Formula, formula_of, width_of


def plan_tensor_2d(draft: PlanBuilder) -> None:
    """Upgrade the 1D plan, which has the sequence split, where tensor_y is above 1.

    Raises StrategyError when the features or the modules of a layer cannot be split over both axes.
    """
    _Planner(draft).plan()


class _Planner:
    def __init__(self, draft: PlanBuilder) -> None:
        self.draft, self.mesh, self.names = draft, draft.mesh, draft.names
        self.x, self.y = draft.mesh.size("tensor_x"), draft.mesh.size("tensor_y")
        self.hidden = int(getattr(draft.config, "hidden_size", 0))
        self.formulas: dict[str, Formula] = {}
        self.gathered = draft.strategy.memory.gathered

    def plan(self) -> None:
        layers, _ = layers_or_refuse(self.draft.model, "axes.tensor_y")
        if self.hidden % self.x:
            raise StrategyError(
                f"axes.tensor_x = {self.x} does not divide the hidden size {self.hidden}, which 2D splits between "
                "layers; use a divisor, or tensor_y: 1"
            )
        attentions: dict[str, Attention] = {}
        mlps: dict[str, Mlp] = {}
        norms: dict[str, Formula] = {}
        swapped: list[str] = []
        for name, layer in self.names[layers].named_children():
            if self._lies_in(f"{layers}.{name}", layer):
                if f"{layers}.{name}" not in self.draft.whole:
                    self.draft.give_all_positions(f"{layers}.{name}")
                continue
            for child, module in layer.named_children():
                full = f"{layers}.{name}.{child}"
                attention, mlp = self._attention(full, module), self._mlp(full, module)
                if attention is not None:
                    attentions[full] = attention
                    self._set_attention(full, attention)
                elif mlp is not None:
                    mlps[full] = mlp
                    self._set_mlp(full, mlp)
                elif is_norm(module) and not any(True for _ in module.children()):
                    norms[full] = self._norm(full, module)
                elif any(True for _ in module.parameters()):
                    swapped.append(full)
        self.draft.tensor2d = Tensor2D(attentions, mlps, norms, tuple(swapped), self.hidden)

    def _lies_in(self, name: str, layer: nn.Module) -> bool:
        """Whether something but norms lies in a layer itself: the layer is then given whole activations."""
        direct = any(
            rule is not None
            for rule in (self.draft.rules.get(f"{name}.{c}") for c, _ in layer.named_children())
        )
        return owns_parameters(layer) or direct or name in self.draft.whole

    # Norms of the residual.

    def _norm(self, name: str, module: nn.Module) -> Formula:
        if module._parameters and width_of(module) != self.hidden:
            raise StrategyError(
                f"axes.tensor_y splits the {self.hidden} features between layers, and the weights of {name!r} "
                f"({type(module).__name__}) are not one for each of them; use tensor_y: 1"
            )
        for own in module._parameters:
            self._set(name, own, [(0, "tensor_x", None)], summed=("tensor_y",))
        # Norms that are made alike are tried once: there are two and more in each of many layers.
        key = signature(module)
        if key not in self.formulas:
            self.formulas[key] = formula_of(name, module, self.hidden)
        return self.formulas[key]

    def _set(
        self,
        name: str,
        own: str,
        split: Iterable[Split],
        summed: tuple[str, ...] = (),
        chosen: tuple[int, tuple[Intervals, ...]] | None = None,
    ) -> None:
        """Decide anew on a parameter: the 1D plan, which decided first, computes with it in another way."""
        live = [(dim, axis, parts) for dim, axis, parts in split if self.mesh.size(axis) > 1]
        summed = tuple(axis for axis in summed if self.mesh.size(axis) > 1)
        self.draft.set_again(name, own, split=live, summed=summed, chosen=chosen)

    # Regions.

    def _projections(self, name: str, module: nn.Module) -> tuple[list[str], str] | None:
        """The colwise projections and the rowwise one, all of them linear maps from and to the residual's features."""
        rules = {
            child: self.draft.rules.get(child)
            for child, leaf in module.named_modules(prefix=name)
            if child != name and owns_parameters(leaf)
        }
        colwise = [child for child, rule in rules.items() if rule == "colwise"]
        rowwise = [child for child, rule in rules.items() if rule == "rowwise"]
        if name not in self.draft.regions or len(rowwise) != 1 or not colwise:
            return None
        if any(rule not in ("colwise", "rowwise", "shared") for rule in rules.values()):
            return None
        projections = [self.names[child] for child in (*colwise, *rowwise)]
        # Products with adapters have terms beside them, which 2D does not sum.
        if any(not is_projection(module) or is_adapted(module) for module in projections):
            return None
        direct = all(child.rpartition(".")[0] == name for child in (*colwise, *rowwise))
        if not direct or features_of(projections[-1], output=True) != self.hidden:
            return None
        if any(features_of(module, output=False) != self.hidden for module in projections[:-1]):
            return None
        tied = any(self.draft.is_tied(child) for child in (*colwise, *rowwise))
        return None if tied else (colwise, rowwise[0])

    def _forget(self, name: str, projections: Iterable[str]) -> None:
        """The 1D plan's boundaries of a region, which 2D has its own of."""
        del self.draft.regions[name]
        for projection in projections:
            del self.draft.modules[projection]

    # Attention.

    def _attention(self, name: str, module: nn.Module) -> Attention | None:
        found = self._projections(name, module)
        region = self.draft.regions.get(name)
        if found is None or region is None or region.heads is None:
            return None
        colwise, rowwise = found
        heads = region.heads
        between = features_of(self.names[rowwise], output=False)
        if between != heads.query * heads.size or not self._splits(heads):
            return None
        for child, leaf in module.named_modules(prefix=name):
            if self.draft.rules.get(child) == "shared" and width_of(leaf) != heads.size:
                return None
        here = max(heads.kv // self.y, 1) * heads.size
        query = heads.query // self.y * heads.size
        sharing = max(self.x // (here // heads.size), 1)
        parts: dict[str, tuple[int, ...]] = {}
        shares: dict[str, tuple[bool, ...]] = {}
        for child in colwise:
            features = features_of(self.names[child], output=True)
            fused = fused_parts(child, features, module, heads)
            if not all(part in (heads.query * heads.size, heads.kv * heads.size) for part in fused):
                return None
            # Of as many query heads as key-value heads all are split alike.
            is_query = [heads.query == heads.kv or part == heads.query * heads.size for part in fused]
            parts[child] = tuple(query if q else here for q in is_query)
            shares[child] = tuple(sharing > 1 and not q for q in is_query)
        return Attention(heads, parts, shares, sharing, rowwise, keeps=self.gathered == "keep")

    def _splits(self, heads: Heads) -> bool:
        """Whether each rank gets whole query heads, and whole key-value heads or one to share."""
        if heads.query % (self.x * self.y) or (heads.kv % self.y and self.y % heads.kv):
            return False
        here = max(heads.kv // self.y, 1)
        return here % self.x == 0 or self.x % here == 0

    def _set_attention(self, name: str, plan: Attention) -> None:
        for child, parts in plan.colwise.items():
            module = self.names[child]
            out, into = dim_of_features(module, output=True), dim_of_features(module, output=False)
            whole = fused_parts(child, features_of(module, output=True), self.names[name], plan.heads)
            even = all(part * self.y == full for part, full in zip(parts, whole, strict=True))
            if even:
                self._set(child, "weight", [(out, "tensor_y", whole), (into, "tensor_x", None)])
            else:
                chosen = (out, self._rows(whole, parts))
                self._set(child, "weight", [(into, "tensor_x", None)], summed=("tensor_y",), chosen=chosen)
        # What the 1D plan says of biases holds: they are added to the heads that a rank attends with.
        self._set_rowwise(plan.rowwise, "tensor_y", "tensor_x")
        self._forget(name, (*plan.colwise, plan.rowwise))

    def _rows(self, whole: tuple[int, ...], parts: tuple[int, ...]) -> tuple[Intervals, ...]:
        """By tensor index, which has x innermost: the rows of each part that a rank of tensor_y computes with."""
        by_y: list[Intervals] = []
        for y in range(self.y):
            at, rows = 0, []
            for full, part in zip(whole, parts, strict=True):
                # With fewer heads than ranks of tensor_y, full / part heads are dealt out to runs of ranks.
                start = at + y * (full // part) // self.y * part
                rows.append((start, start + part))
                at += full
            by_y.append(tuple(rows))
        return tuple(by_y[y] for y in range(self.y) for _ in range(self.x))

    def _set_rowwise(self, name: str, into_axis: str, out_axis: str) -> None:
        module = self.names[name]
        out, into = dim_of_features(module, output=True), dim_of_features(module, output=False)
        self._set(name, "weight", [(into, into_axis, None), (out, out_axis, None)])
        self._set(name, "bias", [(0, "tensor_x", None)], summed=("tensor_y",))

    # MLP.

    def _mlp(self, name: str, module: nn.Module) -> Mlp | None:
        found = self._projections(name, module)
        region = self.draft.regions.get(name)
        if found is None or region is None or region.heads is not None:
            return None
        colwise, rowwise = found
        between = features_of(self.names[rowwise], output=False)
        features = [part for child in colwise for part in self._parts(child, module)]
        shared = any(
            self.draft.rules.get(child) == "shared" for child, _ in module.named_modules(prefix=name)
        )
        if set(features) != {between} or shared:
            return None
        factors = choose_mlp(self.hidden, between, len(features), self.x, self.y, self.gathered)
        keeps = self.gathered == "keep"
        return Mlp(factors, between, tuple(colwise), rowwise, keeps or self.gathered == "mlp", keeps)

    def _parts(self, name: str, parent: nn.Module) -> tuple[int, ...]:
        return fused_parts(name, features_of(self.names[name], output=True), parent, None)

    def _set_mlp(self, name: str, plan: Mlp) -> None:
        axes = plan.axes(self.mesh)
        for child in plan.colwise:
            module = self.names[child]
            out, into = dim_of_features(module, output=True), dim_of_features(module, output=False)
            parts = self._parts(child, self.names[name])
            self._set(child, "weight", [(out, axes.features, parts), (into, axes.hidden_in, None)])
            self._set(child, "bias", [(0, axes.features, parts)], summed=(axes.hidden_in,))
        self._set_rowwise(plan.rowwise, axes.features_in, axes.hidden_out)
        self._forget(name, (*plan.colwise, plan.rowwise))
