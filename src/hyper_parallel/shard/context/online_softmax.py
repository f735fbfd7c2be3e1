"""Online softmax: the running output of attention over incoming blocks.

Of two sets of keys together, as in `kernels.shares`,

    out = exp(lse₁ − lse) out₁ + exp(lse₂ − lse) out₂                    (FlashAttention, arXiv 2205.14135, section 3.1)

summed in the dtype of the log-sum-exp. A block's queries are an interval of those at hand. What is known of the queries
is cut where an interval begins or ends, and a block is merged with the runs inside its own. The first that a query
meets is taken as it is, so that the only block of Ulysses is not merged at all.

Nothing that was made is written to later. A step whose graph recomputes layers can then let go of all these tensors and
make them again, which it cannot do where one was made from what has been overwritten since.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from hyper_parallel.layout.layout import Interval
from hyper_parallel.shard.context.block_attention import accumulation, shares


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
