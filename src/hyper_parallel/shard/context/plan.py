"""Context-parallel plan: the method for a model, and the positions of a sequence that each rank holds.

What cannot be split is refused before anything changes. `auto` goes by what a rank receives for one layer's attention,
forward, with n ranks, S positions, H query and K key-value heads of d features that this rank's tensor index has:

    ring       2·K·d · S · (n − 1) / n                   keys and values of everybody else
    Ulysses    (2·H + 2·K') · d · S · (n − 1) / n²       a 1/n share of queries, outputs, keys and values;
                                                         K' = K, or K repeated until n divides it
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from hyper_parallel.compat.local_tensor import int_on_rank, per_rank
from hyper_parallel.errors import StrategyError
from hyper_parallel.layout.layout import Interval
from hyper_parallel.layout.mesh import Fold, Mesh
from hyper_parallel.shard.lora_adapters import without_adapters
from hyper_parallel.shard.mesh_axis import Axis
from hyper_parallel.shard.model_structure import (
    Heads,
    decoder_of,
    has_encoder,
    heads_of,
    is_transformers,
    layers_or_refuse,
    text_config,
)
from hyper_parallel.strategy import Strategy

RING, ULYSSES = "context_ring", "context_ulysses"
"""The folds of the context axis: its index is ring · u + ulysses."""

_LAYER_KINDS = frozenset({"full_attention", "sliding_attention"})
_MIXERS = re.compile(
    "Mamba|SSM|R[Ww][Kk][Vv]|LinearAttention|GatedDelta|DeltaNet|Recurrent|ShortConv|Retention"
)
_MIXING = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)


@dataclass(frozen=True)
class ContextPlan:
    """How the context axis is used: rings of `ring` ranks, each of `ulysses` ranks that exchange heads."""

    method: Literal["ring", "ulysses", "hybrid", "gathered"]
    ring: int
    ulysses: int
    decoder: str
    """The name of the language model's decoder, whose positions are split."""
    attentions: tuple[str, ...]
    """The names of its attention modules."""
    why: str = ""
    """With `gathered`: why the model's positions cannot be split everywhere."""
    layers: str = ""
    gathered: tuple[str, ...] = ()
    """With `gathered`: the modules inside of `layers`, or layers, that compute with all positions."""


def with_context_folds(mesh: Mesh, plan: ContextPlan | None) -> Mesh:
    """The mesh with the folds that a plan needs."""
    if plan is None:
        return mesh
    over = ("context",)
    return mesh.folded(**{RING: Fold(over, plan.ring, plan.ulysses), ULYSSES: Fold(over, plan.ulysses)})


def plan_context(model: nn.Module, strategy: Strategy) -> ContextPlan | None:
    """The plan of the context axis, None when it has degree 1. Raises StrategyError when the model cannot be split."""
    size = strategy.axes.context
    if size == 1:
        return None
    if not is_transformers(model):
        raise StrategyError(
            f"axes.context = {size} splits positions, which is understood for Transformers models only; "
            f"set axes.context to 1 for {type(model).__name__}"
        )
    core: Any = without_adapters(model)
    if has_encoder(model):
        raise StrategyError(
            f"axes.context = {size} splits the positions of decoder-only language models, and {type(core).__name__} "
            "has an encoder; set axes.context to 1"
        )
    config: Any = text_config(model)
    decoder = decoder_of(model)
    _check(core, config)
    found = {
        name: heads
        for name, module in model.get_submodule(decoder).named_modules(prefix=decoder)
        if (heads := heads_of(module, config)) is not None
    }
    why = _why_gathered(core, config, model.get_submodule(decoder), found)
    if why is not None:
        layers, _ = layers_or_refuse(model, f"axes.context: {why}, so that it")
        return ContextPlan("gathered", 1, size, decoder, (), why, layers)
    method, ulysses = _method(strategy, [_here(heads, strategy.axes.tensor) for heads in found.values()])
    return ContextPlan(method, size // ulysses, ulysses, decoder, tuple(found))


def _check(model: Any, config: Any) -> None:
    for key in ("attention_dropout", "attn_pdrop"):
        if getattr(config, key, None):
            raise StrategyError(
                f"axes.context: {key} is {getattr(config, key)}, and attention that is spread over ranks drops no "
                f"weights; set {key} to 0 in model.config"
            )


def _why_gathered(model: Any, config: Any, decoder: nn.Module, attentions: Mapping[str, Heads]) -> str | None:
    """Why some module of the decoder needs all positions; None where every module computes with a part of them."""
    name = type(model).__name__
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_KINDS)
    if others:
        return f"{name} has layers of kind {', '.join(map(repr, others))}"
    for module, what in mixing(decoder):
        return f"{module or 'the decoder'} is {what}, which mixes positions in other ways than attention"
    if not getattr(model, "_supports_attention_backend", False):
        return f"{name} computes attention in its own code, without Transformers' attention interface"
    # Default positions count from 0 along whole rows. In families that count past padding, the table of positions has
    # a padding index.
    table = model.get_input_embeddings()
    for module, embedding in decoder.named_modules():
        if (
            isinstance(embedding, nn.Embedding)
            and embedding is not table
            and embedding.padding_idx is not None
        ):
            return f"{module} of {name} counts positions past padding"
    if not attentions:
        return (
            f"the attention of {name} is not recognised (known by a number head_dim on the module and "
            "num_attention_heads in the config)"
        )
    return None


def mixing(decoder: nn.Module) -> Iterator[tuple[str, str]]:
    """Modules whose output at a position depends on others, and that are no attention."""
    for name, module in decoder.named_modules():
        kind = type(module).__name__
        if isinstance(module, _MIXING) or _MIXERS.search(kind):
            yield name, f"a {kind}"


def _here(heads: Heads, tensor: int) -> tuple[int, int]:
    """(query, key-value) heads of one index of the tensor axes."""
    query = heads.query // tensor if heads.query % tensor == 0 else heads.query
    return query, max(heads.kv // tensor, 1)


def _method(
    strategy: Strategy, heads: list[tuple[int, int]]
) -> tuple[Literal["ring", "ulysses", "hybrid"], int]:
    size, method, given = strategy.axes.context, strategy.context.method, strategy.context.ulysses
    query, pairs = (math.gcd(*(here[i] for here in heads)) for i in (0, 1))
    if given is not None and size % given:
        raise StrategyError(
            f"context.ulysses is {given}, which does not divide axes.context = {size}; use a divisor"
        )
    by_pairs = max(u for u in range(1, size + 1) if size % u == 0 and pairs % u == 0)
    ulysses = {"ring": 1, "ulysses": size, "auto": by_pairs, "hybrid": given or by_pairs}[method]
    if query % ulysses:
        raise StrategyError(
            f"context.method {method}: Ulysses over {ulysses} ranks needs a multiple of {ulysses} query heads, and "
            f"a rank has {query}; use method: ring, or hybrid with a smaller ulysses"
        )
    if ulysses == size:
        return "ulysses", ulysses
    return ("ring" if ulysses == 1 else "hybrid"), ulysses


# Position split: which positions of a sequence each rank holds.
#
# The axis has index ``ring · u + ulysses``. With a ring of r, the sequence is cut into 2r pieces, and ring index i has
# pieces i and 2r − 1 − i, one from the head and one from the tail: under a causal mask every ring index then has the
# same work (Llama 3, arXiv 2407.21783, section 3.3.2; "zigzag"). What a ring index has is split evenly over its u
# Ulysses ranks, in order. Without a ring, u is the whole axis and each rank holds one run of positions.


def multiple_over_context(ring: int, ulysses: int) -> int:
    """The number that a sequence's length must be a multiple of, to be dealt over rings of `ring` ranks of
    `ulysses`."""
    return math.lcm(2 * ring if ring > 1 else 1, ring * ulysses)


@dataclass(frozen=True)
class PositionSplit:
    """Split of positions over the axis `context`, in which groups of `ulysses` ranks exchange heads."""

    context: Axis
    ulysses: int = 1

    @property
    def ring(self) -> int:
        """How many ring indices there are."""
        return self.context.size // self.ulysses

    @property
    def multiple(self) -> int:
        """The number that a sequence's length must be a multiple of."""
        return multiple_over_context(self.ring, self.ulysses)

    def check(self, length: int) -> None:
        """Refuse a sequence of `length` positions that cannot be dealt evenly."""
        if length % self.multiple:
            raise StrategyError(
                f"{length} positions cannot be split over axes.context = {self.context.size} with rings of "
                f"{self.ring} and Ulysses over {self.ulysses}; pad the sequence to a multiple of {self.multiple}"
            )

    def pieces(self, length: int, ring: int) -> tuple[Interval, ...]:
        """The intervals of positions that a ring index has, in order of position, which is that of its tensors."""
        return position_chunks(length, self.ring, ring)

    def positions(self, length: int, index: int) -> torch.Tensor:
        """int64[length / size]: the global positions that an index of the axis holds, in its order."""
        ring, inner = divmod(index, self.ulysses)
        runs = [torch.arange(start, stop) for start, stop in self.pieces(length, ring)]
        return torch.cat(runs).chunk(self.ulysses)[inner]

    def indices(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """int64[length / size]: the global positions that this rank holds, in its order."""

        def mine(rank: int) -> torch.Tensor:
            return self.positions(int_on_rank(length, rank), self.context.index(rank)).to(device)

        return per_rank(mine)

    def cut(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's positions of what is whole on every rank. Raises StrategyError for a length it cannot deal.

        The gradient is this rank's part of the whole one, zero elsewhere: the ranks' parts are summed, as are all
        gradients over the context axis.
        """
        self.check(x.size(dim))
        return x.index_select(dim, self.indices(x.size(dim), x.device))

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """All positions in their own order, from each rank's; for uses that are the same on every rank."""
        whole = self.context.gather(x, dim)
        order = torch.cat([self.positions(whole.size(dim), index) for index in range(self.context.size)])
        return whole.index_select(dim, torch.argsort(order).to(x.device))


def position_chunks(length: int, rings: int, ring: int) -> tuple[Interval, ...]:
    """The intervals of positions of one of `rings` ring indices: one from the head and one from the tail."""
    if rings == 1:
        return ((0, length),)
    size = length // (2 * rings)
    tail = 2 * rings - 1 - ring
    return (ring * size, (ring + 1) * size), (tail * size, (tail + 1) * size)
