"""The engine of a context-parallel group: each rank computes its part of the rows of a pass, from its own pages.

The scheduler sees groups of pages (`context_group`) and is the same on every rank. A prompt is read in pieces of a
group: each rank reads a page of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hyper_parallel.compat import collectives
from hyper_parallel.inference.engine import Engine
from hyper_parallel.inference.kv_cache.paged_cache import PagedCache
from hyper_parallel.inference.kv_cache.pages import rows_of
from hyper_parallel.inference.kv_cache.run_cache import RunCache
from hyper_parallel.inference.kv_cache.stream import Group
from hyper_parallel.inference.ragged_pass import Segment
from hyper_parallel.inference.workers import context_attention
from hyper_parallel.inference.workers.context_attention import ContextPass
from hyper_parallel.inference.workers.context_group import ContextGroup


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
        super().__init__(model, context.tokens, layers=layers, eos=eos, int8=int8)
        context_attention.register()
        self.attention = context_attention.NAME
        self.cache = RunCache(model, layers, context.tokens, stored=context.page, int8=int8)
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
        """What this rank has of a request's context."""
        local = self._context.local
        older = tuple(Group(local(one.first), local(one.end), one.blocks) for one in segment.older)
        return Segment(index, local(segment.end), 0, segment.runs, local(segment.base), older)
