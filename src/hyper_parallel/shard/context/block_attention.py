"""Blockwise attention: the schedule of blocks, one block with its log-sum-exp, and the online softmax over blocks.

For scores s = scale · q kᵀ (soft-capped: c · tanh(s / c)) over the keys that a query sees:

    lse = log Σ exp(s),   out = Σ exp(s − lse) v                                        `attend`
    lse = log(exp(lse₁) + exp(lse₂)),   out = Σᵢ exp(lseᵢ − lse) outᵢ                   `shares`

(FlashAttention, arXiv 2205.14135, section 3.1). From the *whole* lse and out, a block's part of the gradients follows
by itself: P = exp(s − lse), dV = Pᵀ dO, dS = P ∘ (dO Vᵀ − rowsum(dO ∘ O)), dQ = scale · dS K, dK = scale · dSᵀ Q
(ibid., appendix B.2; Ring Attention, arXiv 2310.01889). Sums are taken in fp32, or in fp64 for fp64 inputs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyper_parallel.compat.kernels import Block, Gradients, Kernel, kernel_for
from hyper_parallel.layout.layout import Interval
from hyper_parallel.shard.context.plan import position_chunks


def accumulation(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums over blocks are taken in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [B, H, S, Dv], lse [B, H, S] in the accumulation dtype) of queries [B, H, S, D], a block of keys
    [B, K, T, D] and values [B, K, T, Dv]; K divides H.

    `mask` is bool [B or 1, 1, S, T], True where seen. `causal` is for S = T. Where nothing is seen out is 0 and lse
    −inf.
    """
    kernel = _kernel(q, v, mask, softcap)
    if kernel is not None:
        out, lse = kernel.forward(Block(q, k, v, mask, causal, scale))
        return out, lse.to(accumulation(q.dtype))
    scores, _ = _scores(q, k, mask, causal, scale, softcap)
    lse = scores.logsumexp(-1)
    weights = (scores - unseen_last(lse).unsqueeze(-1)).exp()
    out = _by_head(weights @ v.to(weights.dtype), q)
    return out.to(v.dtype), _by_head(lse, q)


def attend_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None = None,
) -> Gradients:
    """A block's part of the gradients of q, k and v, given `out` and `lse` of all blocks together."""
    lse = unseen_last(lse)
    kernel = _kernel(q, v, mask, softcap)
    if kernel is not None:
        return kernel.backward(gradient, Block(q, k, v, mask, causal, scale), out, lse)
    scores, bent = _scores(q, k, mask, causal, scale, softcap)
    weights = (scores - _by_group(lse, k).unsqueeze(-1)).exp()
    given, theirs = (_by_group(x.to(scores.dtype), k) for x in (gradient, out))
    dv = weights.transpose(-1, -2) @ given
    delta = (given * theirs).sum(-1, keepdim=True)
    ds = weights * (given @ v.to(scores.dtype).transpose(-1, -2) - delta) * scale
    if bent is not None:
        ds = ds * (1 - bent.square())
    dq = _by_head(ds @ k.to(scores.dtype), q)
    dk = ds.transpose(-1, -2) @ _by_group(q.to(scores.dtype), k)
    return dq, dk, dv


def shares(lse: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(lse of two sets of keys together, the share exp(lseᵢ − lse) of each). Either may have seen nothing."""
    both = torch.logaddexp(lse, more_lse)
    safe = unseen_last(both)
    return both, (lse - safe).exp(), (more_lse - safe).exp()


def unseen_last(lse: Tensor) -> Tensor:
    """The log-sum-exp with +inf where nothing is seen, so that exp(s − lse) is 0 there and no NaN."""
    return lse.masked_fill(lse == float("-inf"), float("inf"))


def _kernel(q: Tensor, v: Tensor, mask: Tensor | None, softcap: float | None) -> Kernel | None:
    return kernel_for(q, v, masked=mask is not None) if softcap is None else None


# Plain arithmetic: the query heads that share a key-value head are rows of one matrix, [B, K, H/K · S, D].


def _by_group(x: Tensor, k: Tensor) -> Tensor:
    return x.reshape(x.size(0), k.size(1), -1, *x.shape[3:])


def _by_head(x: Tensor, q: Tensor) -> Tensor:
    return x.reshape(*q.shape[:3], *x.shape[3:])


def _scores(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Scores [B, K, H/K · S, T], −inf where not seen; and tanh(s / c) where they are soft-capped."""
    dtype, bent = accumulation(q.dtype), None
    scores = _by_group(q.to(dtype), k) @ k.to(dtype).transpose(-1, -2) * scale
    if softcap is not None:
        bent = (scores / softcap).tanh()
        scores = bent * softcap
    if causal:
        mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).tril()[None, None]
    if mask is not None:
        groups = q.size(1) // k.size(1)
        hidden = ~mask.expand(-1, groups, -1, -1).flatten(1, 2).unsqueeze(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores, bent


# Block schedule of ring attention: which query and key blocks are computed, and with which mask.
#
# A query at q sees a key at k when k ≤ q, when k > q − window where there is a window, and when both are of one
# document. Of two intervals of positions this leaves nothing, everything, the causal half, or what only a mask can
# tell. The last are halved until they are small, so that what is nothing or everything in them is found.

Relation = Literal["full", "causal", "masked"]

TILE = 2048
"""The longest side of a block that is computed with a mask: a mask of it has 4 MiB."""


@dataclass(frozen=True)
class AttentionBlock:
    """Queries and keys, as intervals of the tensors at hand and of positions, where these are one interval."""

    queries: Interval
    keys: Interval
    relation: Relation
    query_positions: Interval
    key_positions: Interval


@dataclass(frozen=True, eq=False)
class Documents:
    """The document of each position, int64 [B, S] on the host, never falling along the positions.

    Keys that nobody may see (padding at the end) are of a document that no query is of.
    """

    queries: NDArray[np.int64]
    keys: NDArray[np.int64]

    def together(self, queries: Interval, keys: Interval) -> bool | None:
        """Whether in every row all of both are of one document (True), nothing is (False), or neither (None)."""
        if self is UNKNOWN:
            return None
        first_q, last_q = self.queries[:, queries[0]], self.queries[:, queries[1] - 1]
        first_k, last_k = self.keys[:, keys[0]], self.keys[:, keys[1] - 1]
        if bool(((last_q < first_k) | (last_k < first_q)).all()):
            return False
        if bool(((first_q == last_q) & (first_k == last_k) & (first_q == first_k)).all()):
            return True
        return None


UNKNOWN = Documents(np.zeros((0, 0), np.int64), np.zeros((0, 0), np.int64))
"""Documents that only a run knows: a mask tells them apart wherever causality and the window leave anything to see."""


def relation(
    queries: Interval, keys: Interval, window: int | None, documents: Documents | None
) -> Relation | None:
    """What queries at an interval of positions see of keys at another; None when they see nothing."""
    (q0, q1), (k0, k1) = queries, keys
    if k0 > q1 - 1 or (window is not None and k1 - 1 <= q0 - window):
        return None
    together = documents.together(queries, keys) if documents is not None else True
    if together is False:
        return None
    if together is None or (window is not None and k0 <= q1 - 1 - window):
        return "masked"
    if k1 - 1 <= q0:
        return "full"
    return "causal" if queries == keys else "masked"


def blocks(
    queries: Sequence[Interval],
    keys: Sequence[Interval],
    window: int | None = None,
    documents: Documents | None = None,
    tile: int = TILE,
) -> list[AttentionBlock]:
    """The attention blocks of one step.

    `queries` and `keys`: the intervals of positions in each tensor, which holds them one after the other in order of
    position.
    """
    hull_q, hull_k = (queries[0][0], queries[-1][1]), (keys[0][0], keys[-1][1])
    all_q, all_k = _length(queries), _length(keys)

    def whole(
        q: Interval, at_q: Interval, k: Interval, at_k: Interval, wanted: Relation
    ) -> AttentionBlock | None:
        found = relation(q, k, window, documents)
        return AttentionBlock(at_q, at_k, wanted, q, k) if found == wanted else None

    # Several intervals at once, where what holds for all that lies between them holds for them.
    if list(queries) == list(keys) and (one := whole(hull_q, all_q, hull_k, all_k, "causal")):
        return [one]
    if one := whole(hull_q, all_q, hull_k, all_k, "full"):
        return [one]
    blocks: list[AttentionBlock] = []
    left = []
    for at_k, k in _placed(keys):
        column = whole(hull_q, all_q, k, at_k, "full")
        if column is not None:
            blocks.append(column)
        else:
            left.append((at_k, k))
    for at_q, q in _placed(queries):
        row = whole(q, at_q, hull_k, all_k, "full") if len(left) == len(keys) else None
        if row is not None:
            blocks.append(row)
            continue
        for at_k, k in left:
            blocks += _cover(q, k, at_q[0] - q[0], at_k[0] - k[0], window, documents, tile)
    return blocks


def _length(intervals: Sequence[Interval]) -> Interval:
    return 0, sum(stop - start for start, stop in intervals)


def _placed(intervals: Sequence[Interval]) -> Iterator[tuple[Interval, Interval]]:
    """(where it stands in the tensor, positions) of each."""
    at = 0
    for start, stop in intervals:
        yield (at, at + stop - start), (start, stop)
        at += stop - start


def _cover(
    q: Interval,
    k: Interval,
    shift_q: int,
    shift_k: int,
    window: int | None,
    documents: Documents | None,
    tile: int,
) -> Iterator[AttentionBlock]:
    found = relation(q, k, window, documents)
    if found is None:
        return
    if found != "masked" or max(q[1] - q[0], k[1] - k[0]) <= tile:
        placed_q, placed_k = (q[0] + shift_q, q[1] + shift_q), (k[0] + shift_k, k[1] + shift_k)
        yield AttentionBlock(placed_q, placed_k, found, q, k)
        return
    for half_q in _halves(q, tile):
        for half_k in _halves(k, tile):
            yield from _cover(half_q, half_k, shift_q, shift_k, window, documents, tile)


def _halves(interval: Interval, tile: int) -> list[Interval]:
    start, stop = interval
    if stop - start <= tile:
        return [interval]
    middle = (start + stop) // 2
    return [(start, middle), (middle, stop)]


@functools.lru_cache(maxsize=64)
def steps(length: int, rings: int, window: int | None) -> tuple[int, ...]:
    """The distances t > 0 at which some ring index i sees keys of ring index i − t, the same on every rank."""

    def seen(ring: int, t: int) -> bool:
        return any(
            relation(q, k, window, None) is not None
            for q in position_chunks(length, rings, ring)
            for k in position_chunks(length, rings, (ring - t) % rings)
        )

    return tuple(t for t in range(1, rings) if any(seen(ring, t) for ring in range(rings)))


# Online softmax: the running output of attention over incoming blocks.
#
# Of two sets of keys together, as in `kernels.shares`,
#
#     out = exp(lse₁ − lse) out₁ + exp(lse₂ − lse) out₂                    (FlashAttention, arXiv 2205.14135, section
# 3.1)
#
# summed in the dtype of the log-sum-exp. A block's queries are an interval of those at hand. What is known of the
# queries is cut where an interval begins or ends, and a block is merged with the runs inside its own. The first that a
# query meets is taken as it is, so that the only block of Ulysses is not merged at all.
#
# Nothing that was made is written to later. A step whose graph recomputes layers can then let go of all these tensors
# and make them again, which it cannot do where one was made from what has been overwritten since.


class Runs:
    """Running attention output of queries [B, H, S, ...] over the blocks so far; values have `features` features."""

    def __init__(self, queries: Tensor, features: int) -> None:
        self._queries, self._features = queries, features
        self._lse = queries.new_full(queries.shape[:3], float("-inf"), dtype=accumulation(queries.dtype))
        self._runs = [_Run((0, queries.size(2)), None)]

    def add(self, queries: Interval, out: Tensor, lse: Tensor) -> None:
        """One more block: out [B, H, q, Dv] and lse [B, H, q] of an interval of q queries."""
        start, stop = queries
        both, share, more = shares(self._lse[:, :, start:stop], lse)
        if stop - start < self._lse.size(2):
            both = torch.cat([self._lse[:, :, :start], both, self._lse[:, :, stop:]], 2)
        self._lse = both
        self._runs = [piece for run in self._runs for piece in run.cut(queries)]
        for at, run in enumerate(self._runs):
            first, last = run.queries
            if start <= first and last <= stop:
                inside = slice(first - start, last - start)
                self._runs[at] = run.merged(out[:, :, inside], share[:, :, inside], more[:, :, inside])

    def together(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(out [B, H, S, Dv] in a dtype, lse [B, H, S] in the accumulation dtype) of all blocks that were added.

        Where there was none out is 0 and lse −inf.
        """
        outs = [(self._zeros(run) if run.out is None else run.out).to(dtype) for run in self._runs]
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2), self._lse

    def _zeros(self, run: _Run) -> Tensor:
        first, last = run.queries
        return self._queries.new_zeros((*self._queries.shape[:2], last - first, self._features))


@dataclass(frozen=True, eq=False)
class _Run:
    queries: Interval
    out: Tensor | None
    """None before the first block; a view, where a longer run was cut."""

    def cut(self, queries: Interval) -> list[_Run]:
        """The pieces that lie before, in and behind an interval, as far as there are any."""
        first, last = self.queries
        edges = [first, *(edge for edge in queries if first < edge < last), last]
        if len(edges) == 2:
            return [self]
        return [
            _Run((a, b), None if self.out is None else self.out[:, :, a - first : b - first])
            for a, b in itertools.pairwise(edges)
        ]

    def merged(self, out: Tensor, share: Tensor, more: Tensor) -> _Run:
        """With one more `out`: the shares [B, H, q] are of what is known and of the new one, which alone has all."""
        if self.out is None:
            return _Run(self.queries, out)
        return _Run(self.queries, (self.out * share.unsqueeze(-1)).add_(out * more.unsqueeze(-1)))
