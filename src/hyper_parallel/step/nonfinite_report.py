"""Message for a non-finite loss or gradient: step, batch and worst parameter."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hyper_parallel.errors import NonFiniteError
from hyper_parallel.shard import ShardedModel

_PIECE = 1 << 20
"""Elements."""


def non_finite(
    handle: ShardedModel,
    step: int,
    rows: list[int],
    loss: float,
    norm: float,
    counts: Mapping[str, torch.Tensor] | None = None,
) -> NonFiniteError:
    """The error for `step`, counted from 0. A collective: every rank calls it, and gets the same text.

    `counts`: what `counted` says of this rank's gradients, by the names of their parameters; None to count them.
    """
    if counts is None:
        counts = {p.name: counted(p.grad) for p in handle.owned() if p.grad is not None}
    return NonFiniteError(
        f"step {step + 1}: the loss is {loss:g} and the gradient norm {norm:g}; {_worst(handle, counts)}; the batch is "
        f"rows {shorten(rows)}. Nothing was updated"
    )


def counted(gradient: torch.Tensor) -> torch.Tensor:
    """fp32 [3] of a gradient: elements that are not finite, elements, and the sum of the squares of those that are."""
    rows = gradient.reshape(1) if gradient.dim() == 0 else gradient
    found = torch.zeros(3, device=gradient.device)
    # In pieces, since what this takes comes on top of what a step holds.
    for part in rows.split(max(1, _PIECE * rows.size(0) // max(1, rows.numel()))):
        finite = part.isfinite()
        squares = torch.where(finite, part, 0).float().square().sum()
        found += torch.stack([(~finite).sum().float(), torch.full_like(squares, part.numel()), squares])
    return found


def shorten(rows: list[int]) -> str:
    """The first rows of a batch and how many more there are."""
    more = f" and {len(rows) - 8} more" if len(rows) > 8 else ""
    return ", ".join(map(str, rows[:8])) + more


def _worst(handle: ShardedModel, counts: Mapping[str, torch.Tensor]) -> str:
    """The parameter with the largest share of gradient elements that are not finite, over all ranks."""
    parameters = handle.parameters()
    none = torch.zeros(3, device=handle.device)
    told = torch.stack([counts.get(parameter.name, none) for parameter in parameters])
    table = handle.over_all_ranks(told).tolist()
    shares = [(bad / max(held, 1.0), -index) for index, (bad, held, _) in enumerate(table)]
    share, index = max(shares)
    if share == 0:
        # Every element is finite and the norm overflowed: the largest gradient is the culprit.
        largest = max(range(len(table)), key=lambda i: table[i][2])
        return f"every gradient is finite, the largest is that of {parameters[largest].name!r}"
    affected = sum(bad > 0 for bad, *_ in table)
    return (
        f"the worst gradient is that of {parameters[-index].name!r}, {100 * share:.3g}% of it not finite, and "
        f"{affected} of {len(parameters)} parameters have such elements"
    )
