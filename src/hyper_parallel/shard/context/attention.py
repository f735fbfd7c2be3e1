"""Ulysses and ring attention: the attention function that context parallelism registers with Transformers.

Heads are swapped for positions first, then keys and values go round the ring.
DeepSpeed-Ulysses (arXiv 2309.14509): u ranks that hold S / u positions of all H heads exchange them for all positions
of H / u heads. With fewer key-value heads than u each is sent to the several ranks whose query heads attend with it,
and their gradients are summed. The hybrid runs Ulysses inside and rings outside (USP, arXiv 2405.07719).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.compat import collectives
from hyper_parallel.compat.local_tensor import is_simulated, per_rank_int
from hyper_parallel.errors import StrategyError
from hyper_parallel.layout.layout import Interval
from hyper_parallel.shard.context.block_attention import (
    AttentionBlock,
    Runs,
    accumulation,
    attend,
    attend_backward,
    blocks,
    steps,
    unseen_last,
)
from hyper_parallel.shard.context.mask import ContextMask
from hyper_parallel.shard.mesh_axis import Axis

NAME = "hyper_parallel_context"
"""The name under which attention and its mask are registered with Transformers."""

_AXES = "_hyper_parallel_context_axes"

PASSED_ON = frozenset({"cache_position", "shift_labels", "num_items_in_batch"})
"""Tensors that a call may hand to every layer and that say nothing about attention."""

_KNOWN = PASSED_ON | {"position_ids"}


def give_axes(module: torch.nn.Module, ring: Axis, ulysses: Axis) -> None:
    """Tell an attention module the axes that its positions and heads are split over."""
    module.__dict__[_AXES] = (ring, ulysses)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [B, H, S, D], key [B, K, S, D], value [B, K, S, Dv], of this rank's positions; returns [B, S, H, Dv].

    `s_aux` [H] are sinks. Raises StrategyError for what context parallelism does not compute.
    """
    what = type(module).__name__
    if not isinstance(attention_mask, ContextMask):
        raise StrategyError(
            f"{what} attends with a mask that was not made by Transformers' mask functions ({_kind(attention_mask)}); "
            "axes.context cannot tell what it hides; set axes.context to 1 for this model"
        )
    if dropout > 0:
        raise StrategyError(f"{what} drops attention weights, which axes.context does not; set its rate to 0")
    if is_causal is False or others.get("position_bias") is not None:
        unsupported = "attention in both directions" if is_causal is False else "a bias by position"
        raise StrategyError(
            f"{what} asks for {unsupported}, which axes.context does not compute; set axes.context to 1"
        )
    unknown = sorted(k for k, x in others.items() if isinstance(x, Tensor) and k not in _KNOWN)
    if unknown:
        raise StrategyError(
            f"{what} hands {', '.join(unknown)} to its attention, which axes.context does not know; "
            "set axes.context to 1 for this model"
        )
    ring, ulysses = module.__dict__[_AXES]
    attention_mask.positions.attentions += 1
    scale = scaling if scaling is not None else query.size(-1) ** -0.5
    keys, heads = key.size(-1), query.size(1)
    kv = torch.cat([key, value], -1)
    if ulysses.size > 1:
        query, kv, s_aux = _to_heads(what, ulysses, query, kv, s_aux)
    out = Ring(ring, attention_mask, keys, scale, softcap).attention(query, kv, s_aux)
    if ulysses.size > 1:
        out = ulysses.swap(out, 2, 1)
    assert out.size(1) == heads
    return out.transpose(1, 2).contiguous(), None


def _to_heads(
    what: str, ulysses: Axis, query: Tensor, kv: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    heads, pairs = query.size(1), kv.size(1)
    if heads % ulysses.size:
        raise StrategyError(
            f"{what} has {heads} query heads here, which Ulysses over {ulysses.size} ranks does not divide; "
            "set context.method: ring"
        )
    copies = ulysses.size // math.gcd(pairs, ulysses.size)
    kv = kv.repeat_interleave(copies, 1) if copies > 1 else kv
    if sinks is not None:
        sinks = sinks.index_select(0, ulysses.indices(heads, sinks.device))
    return ulysses.swap(query, 1, 2), ulysses.swap(kv, 1, 2), sinks


def _kind(mask: Any) -> str:
    return f"a tensor {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__


# Ring attention (Liu et al., arXiv 2310.01889): each rank's queries meet every rank's keys block by block.
#
# Liu et al., "Ring Attention with Blockwise Transformers" (arXiv 2310.01889), with the head-tail balance of
# `position_split`. At step t ring index i computes with the keys and values of index i − t, which that index sends to
# it directly; they are asked for before the step t − 1 is computed. Sent directly, and not handed on from neighbour to
# neighbour, a step that no rank needs (beyond a sliding window) is left out altogether, and in the backward pass a
# block's gradients go home once, in the dtype that they were computed in, instead of travelling along in fp32: at home
# they are summed in fp32.
#
# Sinks (GPT-OSS) are one more logit for each head, of a key without a value: they only enter the last lse.


class BlockWork(NamedTuple):
    """A block to compute; intervals are of the tensors at hand."""

    queries: Interval
    keys: Interval
    mask: Tensor | None
    causal: bool


@dataclass(frozen=True, eq=False)
class Ring:
    """The settings of one attention of a ring, besides its tensors."""

    axis: Axis
    mask: ContextMask
    keys: int
    """Features of a key; those of the value follow."""
    scale: float
    softcap: float | None

    def attention(self, q: Tensor, kv: Tensor, sinks: Tensor | None) -> Tensor:
        """[B, H, S, Dv] of queries [B, H, S, D] and keys beside values [B, K, S, D + Dv]; sinks [H].

        S are the positions of this ring index, in order."""
        out: Tensor = _RingAttention.apply(q, kv, sinks, self)  # type: ignore[no-untyped-call]
        return out

    # What is computed.

    def steps(self) -> tuple[int, ...]:
        """The distances to compute at, 0 first; the same on every rank."""
        return (0, *steps(self.mask.positions.length, self.axis.size, self.mask.window))

    def work(self, distance: int, q: Tensor) -> list[BlockWork]:
        """The blocks of a step."""
        if is_simulated():
            whole = (0, q.size(2))
            return [BlockWork(whole, whole, self.mask.seen_at(distance, q.device), False)]
        return [
            BlockWork(
                block.queries,
                block.keys,
                self.mask.seen(block.query_positions, block.key_positions, q.device)
                if block.relation == "masked"
                else None,
                block.relation == "causal",
            )
            for block in self.blocks(distance, self.axis.index(dist.get_rank()) if self.axis.size > 1 else 0)
        ]

    def blocks(self, distance: int, index: int) -> list[AttentionBlock]:
        """The blocks that a ring index computes at a step."""
        positions = self.mask.positions
        mine, theirs = (
            positions.split.pieces(positions.length, ring)
            for ring in (index, (index - distance) % self.axis.size)
        )
        return blocks(mine, theirs, self.mask.window, self.mask.documents)

    # What is sent.

    def begin(self, x: Tensor, distance: int) -> Tensor:
        """Ask for the `x` of the ring index `distance` before this one; to be waited for."""
        one = x.contiguous().unsqueeze(0)
        return collectives.all_to_all_begun(one, self._one(distance), self._one(-distance), self.axis.group)

    def _one(self, distance: int) -> list[int]:
        """One row for the ring index at a distance, none for the others."""
        size = self.axis.size
        return [
            per_rank_int(lambda rank, there=there: int((self.axis.index(rank) + distance) % size == there))  # type: ignore[misc]
            for there in range(size)
        ]


def _arrived(begun: Tensor) -> Tensor:
    return collectives.waited(begun)[0]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, sinks: Tensor | None, ring: Ring) -> Tensor:  # type: ignore[override]
        runs, total = Runs(q, kv.size(-1) - ring.keys), accumulation(q.dtype)
        for distance, block in _blocks_of_keys(ring, kv):
            for (q0, q1), (k0, k1), mask, causal in ring.work(distance, q):
                k, v = _parts(block[:, :, k0:k1], ring)
                runs.add((q0, q1), *attend(q[:, :, q0:q1], k, v, mask, causal, ring.scale, ring.softcap))
        out, lse = runs.together(q.dtype if sinks is None else total)
        if sinks is not None:
            with_sinks = torch.logaddexp(lse, sinks.to(total)[None, :, None])
            out = (out * (lse - with_sinks).exp().unsqueeze(-1)).to(q.dtype)
            lse = with_sinks
        ctx.ring = ring
        ctx.save_for_backward(q, kv, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, kv, sinks, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        total = accumulation(q.dtype)
        dq, dkv = torch.zeros_like(q, dtype=total), torch.zeros_like(kv, dtype=total)
        travelling: Tensor | None = None
        for distance, block in _blocks_of_keys(ring, kv):
            theirs = dkv if distance == 0 else torch.zeros_like(kv, dtype=total)
            for (q0, q1), (k0, k1), mask, causal in ring.work(distance, q):
                every = slice(None)
                here, there = (every, every, slice(q0, q1)), (every, every, slice(k0, k1))
                k, v = _parts(block[there], ring)
                one, dk, dv = attend_backward(
                    gradient[here],
                    q[here],
                    k,
                    v,
                    out[here],
                    lse[here],
                    mask,
                    causal,
                    ring.scale,
                    ring.softcap,
                )
                dq[here] += one
                theirs[there] += torch.cat([dk, dv], -1)
            if travelling is not None:
                dkv += _arrived(travelling)
                travelling = None
            if distance != 0:
                travelling = ring.begin(theirs.to(kv.dtype), -distance)
        if travelling is not None:
            dkv += _arrived(travelling)
        dsinks = _sinks_gradient(gradient, out, lse, sinks) if sinks is not None else None
        return dq.to(q.dtype), dkv.to(kv.dtype), dsinks, None


def _blocks_of_keys(ring: Ring, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(distance, keys beside values) of each step; the next ones are asked for before these are handed out."""
    block, coming = kv, None
    distances = ring.steps()
    for at, distance in enumerate(distances):
        if coming is not None:
            block = _arrived(coming)
        coming = ring.begin(kv, distances[at + 1]) if at + 1 < len(distances) else None
        yield distance, block


def _parts(kv: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    return kv[..., : ring.keys], kv[..., ring.keys :]


def _sinks_gradient(gradient: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """d/d sink = −Σ exp(sink − lse) · rowsum(dO ∘ O): a sink takes from all values and has none."""
    share = (sinks.to(lse.dtype)[None, :, None] - unseen_last(lse)).exp()
    delta = (gradient.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(share * delta).sum((0, 2)).to(sinks.dtype)
