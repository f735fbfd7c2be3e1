"""Context-parallel generation: each rank computes its part of the rows of a pass, and attends from its own pages.

The scheduler sees groups of pages (`ContextGroup`) and is the same on every rank. A prompt is read in pieces of a
group: each rank reads a page of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.compat import collectives
from hyper_parallel.errors import UnsupportedModelError
from hyper_parallel.inference.engine import Engine
from hyper_parallel.inference.kv_cache.paged_cache import PagedCache, PagedLayer
from hyper_parallel.inference.kv_cache.tiers import Group
from hyper_parallel.inference.paged_attention import (
    ExpandsKeys,
    MaskFunction,
    PositionMask,
    checked_mask,
    register,
)
from hyper_parallel.inference.ragged_pass import RaggedPass, Segment, current
from hyper_parallel.inference.rank_groups import ContextGroup, Piece
from hyper_parallel.inference.run_allocator import rows_of


class ContextEngine(Engine):
    """Runs requests on the ranks of a context group, which all call it with the same requests."""

    def __init__(
        self,
        model: nn.Module,
        context: ContextGroup,
        *,
        layers: int,
        eos: frozenset[int],
        int8: bool = False,
    ) -> None:
        super().__init__(model, context.tokens, layers=layers, eos=eos, int8=int8, stored=context.page)
        register(NAME, attention, context_mask)
        self.attention = NAME
        self._context = context
        self.row_length = lambda segments: context.length(context.pieces(segments))

    def _logits(
        self,
        tokens: Sequence[Sequence[int]],
        segments: Sequence[Segment],
        ready: Sequence[Segment],
        cache: PagedCache,
    ) -> Tensor:
        """As `Engine._logits`, on every rank of the group. A collective."""
        context = self._context
        pieces = context.pieces(segments)
        own, length = pieces[context.rank], context.length(pieces)
        row, positions, slots = [0] * length, [0] * length, list[int]()
        for piece in own:
            segment = segments[piece.segment]
            base = context.local(segment.base)
            there = slice(piece.start, piece.start + piece.count)
            row[there] = tokens[piece.segment][piece.first - segment.first : piece.end - segment.first]
            positions[there] = range(piece.first, piece.end)
            first = context.local(piece.first) - base
            for rows in rows_of(segment.runs, context.page, first, first + piece.count):
                slots += range(rows.start, rows.stop)
        contexts = {
            index: self._local(index, segment)
            for index, segment in enumerate(segments)
            if context.local(segment.end)
        }
        ragged = ContextPass(
            list(contexts.values()),
            context.page,
            torch.tensor(slots, dtype=torch.int64, device=self.device),
            context=context,
            pieces=pieces,
            index_of=list(contexts),
        )
        # The rows of this rank whose logits are wanted, and their places in `ready`.
        last = {
            place: piece.start + piece.count - 1
            for place, segment in enumerate(ready)
            for piece in own
            if segments[piece.segment] is segment and piece.end == segment.end
        }
        found = self._forward(
            row, torch.tensor([positions], device=self.device), list(last.values()), ragged, cache
        )
        logits = found.new_zeros(len(ready), found.size(-1))
        if last:
            logits[list(last)] = found
        return collectives.all_reduce(logits, context.group)

    def _local(self, index: int, segment: Segment) -> Segment:
        """This rank's part of a request's context."""
        local = self._context.local
        older = tuple(Group(local(one.first), local(one.end), one.blocks) for one in segment.older)
        return Segment(index, local(segment.end), 0, segment.runs, local(segment.base), older)


# Attention of a context-parallel pass, registered with Transformers as `NAME`: partial results joined by log-sum-exp.
#
# Queries travel, keys and values do not: each rank gets the queries of all ranks, attends with them to its own pages,
# and sends back what it found. For query q, keys K_r of rank r and scores s (FlashAttention, Dao et al. 2022, section
# 3.1):
#
#     o_r = Σ_{k ∈ K_r} exp(s_k - l_r) · v_k,   l_r = log Σ_{k ∈ K_r} exp(s_k)          (`partial`)
#     o   = Σ_r exp(l_r - l) · o_r,             l   = log(Σ_r exp(l_r) + exp(sink))      (`joined`)
#
# A layer sends T·H·D queries and T·H·(D + 1) results a rank, whatever the length of the context. Results are in
# float32. Which keys lie on which rank is a function of their position, so that the sums are the same in any company.

NAME = "hyper_parallel_context"
_BLOCK = 2048
"""Keys whose scores are in memory at once."""


@dataclass(eq=False)
class ContextPass(RaggedPass):
    """A pass whose rows are split. `segments` are the contexts in this rank's pages, one for each request that has any
    there; `index_of` gives the request's place in the pass."""

    context: ContextGroup = field(kw_only=True)
    pieces: Sequence[Sequence[Piece]] = field(kw_only=True)
    """What each rank computes."""
    index_of: Sequence[int] = field(kw_only=True)


def context_mask(*_: Any, mask_function: MaskFunction, **__: Any) -> PositionMask:
    """Makes the mask of `NAME` for a model."""
    return PositionMask(mask_function)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function for `NAME`: query [1, H, L, D] of this rank's rows to output [1, L, H, D of
    values]. A collective of the context group."""
    mask = checked_mask(module, attention_mask, PositionMask, given)
    ragged = current()
    assert isinstance(ragged, ContextPass)
    context = ragged.context
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    read = _contexts(module, key, value, ragged)
    queries = collectives.all_gather(query, context.group, context.size)
    _, heads, length, _ = query.shape
    # The last element of each result is its log-sum-exp.
    sent = torch.zeros(context.size, length, heads, value.size(-1) + 1, device=query.device)
    sent[..., -1] = -torch.inf
    for rank, pieces in enumerate(ragged.pieces):
        for piece in pieces:
            if (found := read(piece.segment)) is None:
                continue
            part = queries[rank, :, piece.start : piece.start + piece.count]
            result = partial(part, *found, piece, context, mask, scale, softcap)
            if result is not None:
                out, lse = result
                rows = sent[rank, piece.start : piece.start + piece.count]
                rows[..., :-1] = out.transpose(0, 1)
                rows[..., -1] = lse.transpose(0, 1)
    each = [1] * context.size
    received = collectives.all_to_all(sent, each, each, context.group)
    return joined(received[..., :-1], received[..., -1], s_aux).to(query.dtype).unsqueeze(0), None


def partial(
    queries_HND: Tensor,
    keys_KSD: Tensor,
    values_KSD: Tensor,
    piece: Piece,
    context: ContextGroup,
    mask: PositionMask,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor] | None:
    """Attention of a piece to this rank's pages, float32 [H, N, D], and log-sum-exp [H, N]; None where it sees none of
    their keys."""
    device = queries_HND.device
    count = context.local(piece.end)
    if not count:
        return None
    local = torch.arange(count, device=device)
    positions = local // context.page * context.tokens + context.rank * context.page + local % context.page
    seen = mask.seen(torch.arange(piece.first, piece.end, device=device), positions)
    any_seen = seen.any(0).nonzero()
    if not len(any_seen):
        return None
    heads, rows, size = queries_HND.shape
    # Contiguous: a view's strides depend on what else is in the pass, and kernels are chosen by them.
    grouped = queries_HND.float().contiguous().view(keys_KSD.size(0), -1, rows, size)
    outs, sums = [], []
    # Blocks begin on a grid of positions, whatever the window is.
    for first in range(int(any_seen[0]) // _BLOCK * _BLOCK, int(any_seen[-1]) + 1, _BLOCK):
        block = slice(first, min(first + _BLOCK, count))
        scores = grouped @ keys_KSD[:, None, block].float().transpose(2, 3) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen[:, block], -torch.inf)
        lse = scores.logsumexp(-1)
        shares = (scores - lse.clamp_min(torch.finfo(torch.float32).min)[..., None]).exp()
        outs.append((shares @ values_KSD[:, None, block].float()).reshape(heads, rows, -1))
        sums.append(lse.reshape(heads, rows))
    if len(outs) == 1:
        return outs[0], sums[0]
    out, lse = torch.stack(outs), torch.stack(sums)
    return joined(out, lse, None), lse.logsumexp(0)


def joined(outs: Tensor, sums: Tensor, sinks_H: Tensor | None) -> Tensor:
    """Attention from partial results [R, ..., D] with log-sum-exp [R, ...], whose last dim is that of heads where there
    are attention sinks. 0 where nothing is seen."""
    total = sums.logsumexp(0)
    if sinks_H is not None:
        total = torch.logaddexp(total, sinks_H.float())
    shares = (sums - total.clamp_min(torch.finfo(torch.float32).min)).exp()
    return (shares[..., None] * outs).sum(0)


Read = Callable[[int], tuple[Tensor, Tensor] | None]


def _contexts(module: nn.Module, key: Tensor, value: Tensor, ragged: ContextPass) -> Read:
    """How keys and values [K, S, D] in this rank's pages are read, by the request's place in the pass."""
    found = ragged.returned.get(key.data_ptr())
    places = dict(zip(ragged.index_of, ragged.segments, strict=True))
    if found is not None and found.same(key, value):

        def out_of_pages(index: int) -> tuple[Tensor, Tensor] | None:
            if index not in places:
                return None
            layer: PagedLayer = found.layer
            keys, values = layer.read(places[index])
            return keys[0], values[0]

        return out_of_pages
    last: PagedLayer | None = ragged.last
    if last is None:
        raise UnsupportedModelError(f"{type(module).__name__} attends without writing to the cache")
    if not last.expand:
        last.expand = True
        raise ExpandsKeys
    parts: dict[int, tuple[Tensor, Tensor]] = {}
    end = 0
    for index, segment in places.items():
        part = slice(end, end + segment.end)
        parts[index] = key[0, :, part], value[0, :, part]
        end += segment.end
    return parts.get
